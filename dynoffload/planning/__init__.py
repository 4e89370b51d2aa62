"""Planning of transfers: blocks of a network, and schedules for a reference string."""
