"""What a federation is compared with: the primary alone, and all features in one place."""
