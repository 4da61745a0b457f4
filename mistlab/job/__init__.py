"""What a plan file says, and what is answered."""
