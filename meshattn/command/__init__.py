"""What `meshattn plan` and `meshattn calibrate` do; nothing of the library imports it."""
