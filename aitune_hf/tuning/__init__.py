"""Records, builds, checks, times and decides."""
