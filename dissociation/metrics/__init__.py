"""What is measured on networks and on their representations."""
