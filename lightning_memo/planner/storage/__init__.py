"""Where each kind of tensor is stored (`storage="kinds"`), decided by a linear program."""
