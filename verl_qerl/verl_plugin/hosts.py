"""What we change in verl, or repeat of its source, beside the functions that shims.py replaces; and in transformers.

A method that ours overrides is listed here too, public hooks among them: verl says of none that it stays.
"""

from functools import partial

from verl_qerl.modules.hosts import TORCH, TRANSFORMERS
from verl_qerl.upstream import Register

_verl, _torch, _transformers = Register("0.9.1"), Register(*TORCH), Register(*TRANSFORMERS)
_method, _data, _registry, _copy, _override = (
    partial(_verl.add, kind) for kind in ("method", "data", "registry", "copy", "override")
)
_overrides = _verl.add_overrides

SAMPLE = _method(
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer.sample",
    "The trainer's hook after sampling is not told what was sampled.",
    "993d0cbef040",
)
POLL_INTERVAL = _data(
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer.__init__",
    "Finished answers are looked for every 0.2 s, not every 2 s.",
    "34790114ebe5",
    "verl/0012",
)
MODEL_CONFIG = _data(
    "verl.workers.config.model:HFModelConfig",
    "all-linear means the attention where experts are packed.",
    "0c4bce126dff",
)
HEAD = _torch.add(
    "class",
    "torch.nn.modules.linear:Linear.forward",
    "The output head gives log-probs in chunks, without all logits at once.",
    "76181b0142f4",
)
MODEL = _transformers.add(
    "class",
    "transformers.modeling_utils:PreTrainedModel.__init_subclass__",
    "A causal language model passes labels to its head and returns log-probs.",
    "7e5216f3d6fa",
)
CHECKPOINTED = _transformers.add(
    "data",
    "transformers.modeling_layers:GradientCheckpointingLayer",
    "Layers whose activations fit into memory are not computed again.",
    "fd0517742db1",
)
_TRAINER = "Features of ours are called before or after verl's own method."

_registry(
    "verl.trainer.ppo.v1.trainer_base:get_trainer_cls",
    "TRAINER_REGISTRY has our subclass of each trainer.",
    "a5b3ce304945",
)
_registry("verl.workers.engine.base:EngineRegistry", "Our engine is found before verl's FSDP engine.", "f07ea1601100")
_registry("verl.workers.rollout.replica:RolloutReplicaRegistry", "The rollout vllm has our server.", "3f6c8ceeaee4")
_registry(
    "verl.workers.rollout.base:get_rollout_class",
    "_ROLLOUT_REGISTRY has our sender of weights to vLLM.",
    "d0be5827f121",
)
_copy(
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_module",
    "Its steps around a model whose linears are packed.",
    "a216ab0ed208",
)
_copy("verl.utils.fs:copy_to_shm", "Its name for a copy, which may be old.", "3f64fce75977")
_override(
    "verl.models.transformers.dense_common:forward_with_torch_backend",
    "The head itself is called for log-probs, so that FSDP2 gathers it.",
    "9dfa2d5c62a0",
)
_override(
    "verl.plugin.platform.platform_base:PlatformBase", "verl runs without a GPU (VERL_PLATFORM=cpu).", "a521d0ace428"
)
_overrides(
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer",
    _TRAINER,
    {
        "__init__": "42c4b73f76c1",
        "_add_prompts_to_generate": "c73e27fb5a0a",
        "_build_replay_buffer": "e0a1b665f5d7",
        "_compute_old_log_prob": "e9ee1fc72ac5",
        "_compute_ref_log_prob": "614438221776",
        "_compute_values": "c0652f0a82fc",
        "_consume_sync_metrics": "022a4dab7773",
        "_init_dataloader": "f11797ad84a4",
        "_load_checkpoint": "52b412c5395b",
        "_save_checkpoint": "1ceb1e087ce9",
        "_update_actor": "604dd6989c33",
        "_update_critic": "b8ad143baf56",
        "fit": "f1c6fc155674",
        "on_validate_begin": "52d417224241",
        "on_validate_end": "4b58a5ef2c6c",
    },
)
_override("verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync", _TRAINER, "beb30ff5187a")
_override("verl.trainer.ppo.v1.trainer_colocate_async:PPOTrainerColocateAsync", _TRAINER, "678d665bb28c")
_override("verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync", _TRAINER, "e98a0390f091")
_override("verl.workers.config.engine:FSDPEngineConfig", "It carries our options of the base.", "0a59f7894a5a")
_overrides(
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine",
    "The base is packed and frozen, or all weights are quantized as they are sent.",
    {
        "_build_fsdp_module": "41da6c4ed82d",
        "_build_lora_module": "76f34df1cec5",
        "_build_optimizer": "30cd7818997a",
        "forward_backward_batch": "788138f58fb1",
        "get_per_tensor_param": "84342236ef69",
        "load_checkpoint": "6c3090b487ad",
        "save_checkpoint": "c39947c86a66",
        "train_mode": "b40c6b784837",
    },
)
_override(
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._merged_lora_per_tensor_param",
    "An adapter is merged into each weight as it is sent, not into the model, which verl copies to the CPU and back.",
    "70e88d6b2db8",
    "verl/0019",
)
_overrides(
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead",
    "The head that gives log-probs is told whether the entropy is wanted.",
    {"prepare_model_inputs": "fd0acb0fe309"},
)
_overrides(
    "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightReceiver",
    "A receiver sees that its sender has gone.",
    {"_init_socket": "5b704556bcb8"},
)
_overrides(
    "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension",
    "A worker with a packed base takes adapters and quantized weights, and no QAT.",
    {"__new__": "5cc65debdbfb", "_update_weights": "908418f84c2e", "update_weights_from_ipc": "fb3651ca424d"},
)
_overrides(
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer",
    "The server describes our checkpoints to vLLM and asks for an answer once.",
    {
        "__init__": "8a011d91c6ed",
        "_preprocess_engine_kwargs": "a078cddba599",
        "generate": "4ec002789c37",
        "run_server": "542a06f053fe",
    },
)
_overrides(
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer",
    "Answers are scored while requests of training wait.",
    {"_park_until_admitted": "aa77d842aff5"},
)
_override(
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.collective_rpc",
    "It returns what the workers answer.",
    "25f008554b63",
    "verl/0004",
)
_overrides(
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMReplica",
    "A replica starts our server.",
    {"__init__": "d5d23a2a04e4"},
)
_override(
    "verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter.__init__",
    "Its socket has a name that no other run has.",
    "43eb8875a3e8",
    "verl/0013",
)
_overrides(
    "verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter",
    "Weights are sent to an engine that runs, or not at all.",
    {"_execute_method": "051661db69e6", "update_weights": "2d5536219ed1"},
)

CHANGES = (*_verl, *_torch, *_transformers)
