"""What a compile found, for programs and for people."""
