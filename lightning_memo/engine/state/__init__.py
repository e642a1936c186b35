"""What a layer may read and change besides its inputs and outputs, and what undoes it."""
