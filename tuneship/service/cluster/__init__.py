"""The parts that know of several members of a cluster: leader, agents, shared demand."""
