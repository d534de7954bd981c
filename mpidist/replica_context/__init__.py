"""The context of code inside `Strategy.run`, and the calls that replicas of one rank make together."""
