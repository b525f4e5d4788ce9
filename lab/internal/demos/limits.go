package demos

// LimitValues are values, as helm's --set takes them, with which the driver limits units of
// memory of NVIDIA's GPUs; besides MixedValues.
const LimitValues = "sharedResources[1].isolation=driver,node.vendors.nvidia.injection={cdi},node.vendors.nvidia.cdiDisableHooks={all}"
