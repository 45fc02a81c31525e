"""What verl's loop of an agent with tools needs where the model, of random weights, calls none by itself.

verl loads it as `rollout.multi_turn.function_tool_path`, before it makes the first loop.
"""

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool
from verl.tools.schemas import OpenAIFunctionToolSchema


@function_tool
def agree() -> str:
    """Say yes."""
    return "yes"


@ToolParser.register("any_text")
class AnyText(ToolParser):
    """Takes whatever the model says for a call of `agree`."""

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[OpenAIFunctionToolSchema] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """What was said, and the call."""
        return self.tokenizer.decode(responses_ids), [FunctionCall(name="agree", arguments="{}")]


@register("tool_agent_until_a_digit")
class UntilADigit(ToolAgentLoop):
    """verl's, with stop strings, for which verl has no option, and turns that leave room for a second one."""

    async def run(self, sampling_params: dict, **kwargs) -> AgentLoopOutput:
        """Run both turns."""
        return await super().run(sampling_params | {"stop": list("0123456789"), "max_tokens": 16}, **kwargs)
