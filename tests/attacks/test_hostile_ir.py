"""OpenVINO IR that reads other files, or makes its reader grow."""

from __future__ import annotations

import pytest
from attack_kit import Victim, data_key

from aitune_hf.hub.objection import Limits

ENTITY = '<?xml version="1.0"?><!DOCTYPE net [<!ENTITY x SYSTEM "file:///etc/passwd">]><net name="&x;"/>'
LAUGHS = (
    '<!DOCTYPE net [<!ENTITY a "ha"><!ENTITY b "' + "&a;" * 50 + '"><!ENTITY c "' + "&b;" * 50 + '">]><net>&c;</net>'
)


@pytest.mark.parametrize(
    "attack",
    [
        ENTITY.encode(),
        LAUGHS.encode(),
        b"<!DOCTYPE net><net/>",
        ENTITY.encode("utf-16"),
        b"<other/>",
        b"<net>",
        b"",
        b"<net/><net/>",
        b'<net a="1" a="2"/>',
        b"<net>\x00</net>",
        b"<l>" * 100 + b"</l>" * 100,
        b"<net>" + b"<l>" * 100 + b"</l>" * 100 + b"</net>",
        b'<net><rt_info><__weights_path value="/etc/shadow"/></rt_info></net>',
        b'<net><rt_info><attribute name="__weights_path" value="x"/></rt_info></net>',
    ],
)
def test_hostile_ir_is_refused(victim: Victim, attack: bytes) -> None:
    victim.lay_entry(data_key(), {"model.xml": attack, "model.bin": b"1234"})
    victim.refused(data_key(), "malformed", "model.xml", trust=None)


def test_size_and_number_of_elements_are_bounded(victim: Victim) -> None:
    victim.lay_entry(data_key(), {"model.xml": b"<net>" + b"<l/>" * 1000 + b"</net>"})
    victim.refused(data_key(), "malformed", "model.xml", trust=None, limits=Limits(fields=1000))
    victim.refused(data_key(), "malformed", "model.xml", trust=None, limits=Limits(document_bytes=4000))
    victim.admitted(data_key(), trust=None)


def test_ir_of_openvino_is_taken(victim: Victim) -> None:
    openvino = pytest.importorskip("openvino")
    numpy = pytest.importorskip("numpy")
    from openvino import opset13

    parameter = opset13.parameter([2, 3], numpy.float32)
    total = opset13.add(parameter, opset13.constant(numpy.ones((2, 3), numpy.float32)))
    folder = victim.root / "made"
    folder.mkdir()
    openvino.save_model(openvino.Model([total], [parameter]), folder / "model.xml")
    victim.lay_entry(data_key(), {item.name: item.read_bytes() for item in folder.iterdir()})
    victim.admitted(data_key(), trust=None)
