"""What will run next, and moving it in time."""
