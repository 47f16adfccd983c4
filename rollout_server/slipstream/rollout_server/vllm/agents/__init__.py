"""Serves agents with vLLM's own HTTP application, which has the APIs of OpenAI and Anthropic."""
