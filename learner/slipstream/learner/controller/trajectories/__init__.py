"""From deliveries of the queue to a journaled batch."""
