"""The trainer ranks: parameters, optimizer, policy version, and the sending of new weights."""
