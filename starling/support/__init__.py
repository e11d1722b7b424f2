"""What `starling support-bundle` collects, and how it removes secrets."""
