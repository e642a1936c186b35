"""Table, CSV file and pictures of a sweep of estimates."""
