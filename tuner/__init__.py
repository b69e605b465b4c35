"""Search and measurement: finds the settings of lossyspec for a device, a model pair and a task."""
