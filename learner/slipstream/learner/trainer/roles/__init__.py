"""The models beside the policy: reference and critic."""
