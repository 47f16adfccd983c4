import pytest
from slipstream.core.machine.gpu_memory import without_processes

FACTS = (
    "CUDA out of memory. Tried to allocate 1.45 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 775.75 MiB is free."
)
ADVICE = (
    " Including non-PyTorch memory, this process has 16.27 GiB memory in use. Of the allocated "
    "memory 13.09 GiB is allocated by PyTorch, and 143.25 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF."
)


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ("", ""),
        (
            " Process 17 has 512.00 MiB memory in use.",
            " Another process uses 0.5 GiB of it.",
        ),
        (
            " Process 1745 has 16.60 GiB memory in use. Process 2451 has 18.63 GiB memory in use.",
            " 2 other processes use 35.2 GiB of it.",
        ),
    ],
)
def test_a_full_gpu_is_told_in_three_sentences(others: str, says: str) -> None:
    text = f"torch.OutOfMemoryError: {FACTS}{others}{ADVICE}"
    assert without_processes(text) == f"torch.OutOfMemoryError: {FACTS}{says}"


@pytest.mark.parametrize("text", ["ValueError: 3 is free.", "CUDA out of memory", ""])
def test_other_messages_stay_as_they_are(text: str) -> None:
    assert without_processes(text) == text
