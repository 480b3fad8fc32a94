"""What knows that a service may have several members: leader, agents, shared demand."""
