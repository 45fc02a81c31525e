// Programmatic dependent launch (kernels/rollout/launch.py): what a block may do before the kernels before it have ended.
//
// A grid may start when every block of the grid before has called start_next or ended. It ends only after all its blocks
// have returned from await_inputs, that is after the grid before has ended, and so on: whoever returns from await_inputs
// knows that all earlier grids have ended, and sees what they wrote. Before it, any number of them may still run, in the
// same CUDA graph: memory that no kernel of a graph writes (weights, adapters) may be read, nothing else, and nothing
// written, whether or not it is scratch of this kernel alone. A grid starts only once all blocks of the grid before have
// their places, so blocks that wait take no place from those that they wait for.

__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// For every thread that touches other memory; without programmatic dependent launch it returns at once.
__device__ __forceinline__ void await_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
