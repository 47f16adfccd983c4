"""The trainer ranks, which hold parameters, optimizer and policy version, and send new weights."""
