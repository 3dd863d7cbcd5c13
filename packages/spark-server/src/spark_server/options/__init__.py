"""What can be typed after `spark serve`: each option declared once, as a field of a group dataclass."""
