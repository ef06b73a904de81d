"""Data and types without torch: skip masks, latency tables, acceptance profiles, domains, prompt files."""
