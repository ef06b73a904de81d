"""What is known about the world: skip masks, latency tables, acceptance profiles, domains, prompt files."""
