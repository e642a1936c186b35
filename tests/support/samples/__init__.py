"""Models, documents, plans and callbacks that several test modules share."""
