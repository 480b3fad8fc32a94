"""What runs where: automations, blocks, worker and service units."""
