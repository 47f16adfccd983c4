"""Plain computations that the product is compared with."""
