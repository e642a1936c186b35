"""Division of batches over ranks: token layout, loaders, batches and the arguments of the loss."""
