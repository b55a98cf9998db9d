"""Short chat templates in the style of published ones: how they take tools, and write tool calls and reasoning."""

from __future__ import annotations

#: Qwen2.5's and Hermes's, with Qwen3's reasoning
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nFor each call, return <tool_call>\\n{"name": <function-name>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content }}
        {%- for call in m.tool_calls %}
            {%- if m.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
THINKING_QWEN = QWEN + (
    "{%- if add_generation_prompt and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)
#: QwQ's and DeepSeek-R1's: a new answer always begins with reasoning
ALWAYS_THINKS = QWEN.replace("assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n' }}{%- endif %}{#- </think> #}")
#: Llama 3.1's
LLAMA = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception("only single tool-calls at once!") }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '[assistant]{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- '[' + m.role + ']' }}
        {%- if tools and loop.first %}
            {{- 'Respond in the format {"name": function name, "parameters": dictionary}.' }}
            {%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}
        {%- endif %}
        {{- m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}"""
#: Mistral Nemo's
MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if loop.last and tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception("IDs must have length 9!") }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- m.content + eos_token }}
    {%- endif %}
{%- endfor %}"""
#: Devstral's and Ministral's: names outside of the JSON, and Magistral's reasoning
NAMED_MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if loop.last and tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {%- if m.thinking %}{{- '[THINK]' + m.thinking + '[/THINK]' }}{%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}"""
#: gpt-oss's
HARMONY = """\
{{- '<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\\nnamespace functions {' }}
    {%- for tool in tools %}
        {{- '\\n// ' + tool.function.description + '\\ntype ' + tool.function.name + ' = (_: any) => any;' }}
    {%- endfor %}
    {{- '\\n}<|end|>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- set call = m.tool_calls[0].function %}
        {%- if m.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
#: takes tools, and writes their calls in a way of its own
OTHER_CALLS = QWEN.replace("<tool_call>", "<invoke>").replace("</tool_call>", "</invoke>")
