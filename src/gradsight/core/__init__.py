"""What every instrument stands on, and that knows no instrument."""
