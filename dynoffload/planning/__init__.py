"""What moves when: blocks of a network, and schedules of a reference string."""
