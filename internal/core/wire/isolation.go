package wire

// IsolationCondition is the condition of a Node that is true while the memory of a device is
// not limited for all that use it, although the configuration wants it to be. It is missing
// where no resource is configured so.
const IsolationCondition = "DivvyIsolationLost"
