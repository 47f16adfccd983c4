from slipstream.learner.algorithms.inputs import LossInputs
import torch.distributed as dist
def good(tokens: LossInputs):
    return -tokens.advantages * (tokens.logprobs - tokens.proximal_logprobs).clamp(-20,20).exp()
def pad(tokens: LossInputs):
    return -tokens.advantages * tokens.logprobs / len(tokens.mask)
def rank(tokens: LossInputs):
    extra = dist.get_rank() if dist.is_initialized() else 0
    return -tokens.advantages * tokens.logprobs * (1 + extra)
