"""Lets agents talk to the application of vLLM that speaks the APIs of OpenAI and Anthropic."""
