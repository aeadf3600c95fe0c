"""The pure core: observe, desired, plan. No clock, no network, no kopf; time and state come in as arguments."""
