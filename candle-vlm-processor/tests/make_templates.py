"""Writes tests/data/templates.json: what transformers renders from templates that use what chat templates use.

Run by hand with Python 3 and transformers 5.24:

    python make_templates.py
"""

import json
from pathlib import Path

from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

MESSAGES = [
    {"role": "system", "content": "  Be brief & kind.\n"},
    {"role": "user", "content": [{"type": "image", "url": "a.png"}, {"type": "text", "text": "Où est-ce ? <b>"}]},
    {"role": "assistant", "content": None, "reasoning": "I look.", "tool_calls": [
        {"id": "c1", "function": {"name": "find", "arguments": {"z": 1, "a": [1.0, 2.5e-7, 1e22, None, True], "q": "\"x\"\\\u0007\n"}}}]},
    {"role": "tool", "name": "find", "content": "Brest"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIn Brest.  "},
]
TOOLS = [{"type": "function", "function": {"name": "find", "description": "It's <here>", "parameters": {
    "type": "object", "properties": {"place": {"type": "string", "enum": ["é", "🌊"]}}, "required": []}}}]
TEMPLATES = {
    "printing": "{{ none }}|{{ true }}|{{ 1.0 }}|{{ 1e22 }}|{{ 0.00001 }}|{{ 123456789.125 }}|{{ 7 // 2 }}|{{ -7 % 3 }}|{{ 7 / 2 }}|{{ 2 ** 3 }}",
    "lists": "{{ [1, 'a', none, true, \"it's\"] }}|{{ {'k': [1, 'b']} }}|{{ (1, 2) | list }}",
    "float-lists": "{{ [1e-7, (1.5, 1e16), {'k': [2e30, 'a']}] }}|{{ {'x': 0.1} }}|{{ [1.0] | string }}",
    "undefined": "[{{ nothing }}]{% for x in nothing %}x{% endfor %}{{ nothing is defined }}{{ messages[0].nothing is defined }}{{ tools is none }}",
    "concat": "{{ 'a' ~ 1 ~ true ~ none ~ 'b' }}{{ 'x' + 'y' }}{{ 'ab' * 3 }}",
    "loop": "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{% if loop.first %}F{% endif %}{% if loop.last %}L{% endif %}{{ loop.previtem.role if loop.previtem is defined else '-' }} {% else %}none{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, seen=false) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.n = ns.n + loop.index0 %}{% set ns.seen = true %}{% endif %}{% endfor %}{{ ns.n }} {{ ns.seen }}",
    "macro": "{% macro turn(role, text='-') -%}\n<{{ role }}>{{ text | trim }}</{{ role }}>\n{%- endmacro %}{% for m in messages %}{{ turn(m.role, m.content if m.content is string else 'parts') }}{{ turn('x') }}\n{% endfor %}",
    "parts": "{% for m in messages %}{% if m['content'] is string %}{{ m.content }}{% elif m.content is iterable %}{% for p in m.content %}{% if p.type == 'image' or 'url' in p %}<img>{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% else %}?{% endif %};{% endfor %}",
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{{ t | tojson(indent=4) }}\n{{ t.function | tojson(separators=(',', ':')) }}\n{{ t.function.parameters | tojson(ensure_ascii=true, sort_keys=true) }}{% endfor %}{% endif %}",
    "calls": "{% for m in messages if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% for k, v in c.function.arguments | dictsort %}{{ k }},{% endfor %}{% endfor %}{% endfor %}",
    "methods": "{% set t = messages[4].content %}{{ t.split('</think>')[-1].lstrip('\\n').rstrip() }}|{{ t.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') }}|{{ 'a,b'.split(',') | join('+') }}|{{ 'Abc'.lower() }}|{{ 'abc'.endswith('c') }}|{{ t.find('</think>') }}|{{ 'x'.join(['1','2']) }}|{{ messages[2].get('content', 'none') }}|{{ messages[2].get('absent') }}",
    "reasoning": "{% for m in messages %}{% if m.reasoning_content is defined and m.reasoning_content %}{{ m.reasoning_content }}{{ m.thinking }}{% endif %}{% endfor %}",
    "slices": "{{ messages[1:] | length }}{{ messages[-1].role }}{{ messages[::2] | map(attribute='role') | join(',') }}{{ 'abcdef'[1:-1] }}{{ messages[:-1][-1].role }}",
    "filters": "{{ messages | selectattr('role', 'equalto', 'assistant') | list | length }}{{ [3,1,2] | sort | first }}{{ 'a b' | replace(' ', '_') | upper }}{{ nothing | default('d') }}{{ '' | default('e', true) }}{{ [1,2] | last }}{{ 'x' | length }}{{ '3' | int + 1 }}{{ 3.7 | int }}{{ ' y ' | trim }}{{ 'q' | string }}{{ 1.0 | string }}{{ [1, 2] | string }}{{ messages | rejectattr('role', 'equalto', 'tool') | list | length }}{{ 'a\nb' | indent(2) }}{{ 'hello' | capitalize }}{{ [1,2,3] | sum }}{{ '%s-%d' | format('a', 3) }}",
    "tests": "{{ 1 is number }}{{ 'a' is string }}{{ {} is mapping }}{{ [] is sequence }}{{ none is none }}{{ true is true }}{{ 'a' in 'abc' }}{{ 'role' in messages[0] }}{{ 3 is odd }}{{ 1 is defined }}{{ not [] }}{{ 'x' is in ['x'] }}{{ 1.0 is float }}{{ true is boolean }}{{ 1 is integer }}",
    "trim": "{% for m in messages %}\n    {% if m.role == 'user' %}\n  U\n    {%- else -%}\n  o  \n    {% endif %}\n{% endfor %}\n\nend\n",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}!\n{% endgeneration %}{% else %}{{ m.role }}\n{% endif %}{% endfor %}",
    "generation-trim": "{%- for m in messages %}\n  {%- if m.role == 'assistant' %}\n    {%- generation %}\n {{ m.content or 'call' }}\n    {%- endgeneration %}\n  {%- endif %}\n{% endfor -%} {# {% generation %} #}{{ '{% generation %}' }}",
    "break": "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ enable_thinking }}{% if add_generation_prompt %}>{% endif %}",
    "set-block": "{% set x %}\n  a{{ 1 }}\n{% endset %}[{{ x | trim }}]{% set y = x | trim %}{{ y }}{% if y == 'a1' and not none %}ok{% endif %}",
    "nested": "{% for m in messages %}{% set outer = loop %}{% for c in m.tool_calls or [] %}{{ outer.index }}.{{ loop.index }}{% endfor %}{% endfor %}{% filter upper %}abc{% endfilter %}",
    "ternary": "{{ 'a' if false }}|{{ messages[0].role if messages else 'none' }}|{{ (messages[0].content | trim) + '\\n' }}|{{ \"\\t\" }}|{{ 'é' | upper }}",
    "raw": "{% raw %}{{ x }}{% generation %}{% endraw %}",
    "strings": "{{ 'a' 'b' }}{{ 'tab\\tquote\\'' }}{{ \"\\u00e9\" }}{{ messages[0].content | tojson }}{{ 'x' == 'x' }}{{ 'a' < 'b' }}{{ [1] + [2] }}{{ 5 | abs }}{{ 2.5 | round }}{{ range(3) | list }}",
    "dict": "{% set d = dict(a=1, b='x') %}{{ d.a }}{{ d['b'] }}{{ d.c is defined }}{% for k in d %}{{ k }}{% endfor %}{{ d | length }}{{ d.keys() | list }}{{ d.values() | list }}",
    "spaces": "a {%- if true %} b {%- endif %} c\n{%+ if true %} d{% endif %}\n   {# note #}\n  e",
    "newlines": "a\r\n{% if true %}\r\nb\r{% endif %}c\r\n",
    "unpacking": "{% set a, b = 1, 'x' %}{{ a }}{{ b }}{% for x, y in [(1, 2), (3, 4)] %}{{ x + y }}{% endfor %}{{ 1 < 2 < 3 }}{{ 'a' not in 'bcd' }}{{ 'abc'[:2] }}{{ 'abc'[-1] }}{{ [1, 2, 3][-2:] }}",
    "more-filters": "{{ ['b', 'a', 'b'] | unique | list }}{{ ['a', 'b'] | map('upper') | join }}{{ [1, 2, 3, 4] | select('even') | list }}{{ [{'k': 1}, {'k': 2}] | map(attribute='k') | list }}{{ 'x' | tojson | safe }}{{ {'b': 1, 'a': 2} | items | list }}{{ [[1, 2], [3]] | first | last }}{{ 'a-b' | replace('-', '') }}{{ 'abc' | reverse }}{{ [1, none, 2] | reject('none') | list }}{{ 'A B' | lower }}{{ 12.5 | int }}{{ '7.5' | float }}{{ ['a', 'c'] | max }}{{ 'aXb' | title }}",
    "macro-globals": "{% macro f(x) %}{{ bos_token }}{{ messages | length }}{{ x.a if x.a is defined else 'no' }}{{ varargs | length }}{% endmacro %}{{ f({'a': 1}) }}{{ f({}) }}{% macro wrap(t) %}<{{ t }}>{{ caller() }}</{{ t }}>{% endmacro %}{% call wrap('b') %}in{% endcall %}",
    "namespace-lists": "{% set ns = namespace(found=[], last=none) %}{% for m in messages %}{% if m.role == 'assistant' %}{% set ns.found = ns.found + [loop.index0] %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ ns.found }}{{ ns.last }}{% for i in ns.found | reverse %}{{ i }}{% endfor %}",
    "recursive": "{% for x in [{'n': 1, 'c': [{'n': 2, 'c': []}]}] recursive %}{{ x.n }}{{ loop.depth }}{% if x.c %}({{ loop(x.c) }}){% endif %}{% endfor %}{% for i in range(4) %}{{ loop.cycle('a', 'b') }}{{ loop.revindex }}{% endfor %}",
    "format": "{{ '{} and {}'.format('a', 1) }}{{ 'a,b,,c'.split(',') }}{{ ' a  b '.split() }}{{ 'a.b.c'.rsplit('.', 1) }}{{ 'x=1'.partition('=') }}{{ 'ab'.replace('a', 'b', 1) }}{{ 'abc'.index('c') }}{{ 'abc'.removeprefix('a') }}{{ 'abc'.removesuffix('c') }}{{ 'abc'.removesuffix('x') }}{{ 'a.b.c'.rpartition('.') }}{{ 'abc'.partition('-') }}{{ 'abc'.rpartition('-') }}{{ 'a.b.c'.rsplit('.') }}",
    "comparisons": "{{ 1 == 1.0 }}{{ 'a' == none }}{{ [] == [] }}{{ none == nothing }}{{ 0 or 'z' }}{{ '' and 'y' }}|{{ not nothing }}{{ messages[0].get('x') is none }}{{ messages[0]['x'] is defined }}{{ (messages[1].content | length) == 2 }}{{ messages[1].content is not string }}{{ messages[1].content is sequence }}{{ messages[0] is mapping }}",
    "escapes": "{{ '<a href=\"x\">&amp;' }}{{ '<b>' | e }}{{ 'a\\nb' }}{{ 'é\u00e8\x41' }}{{ \"it's\" }}",
    "scopes": "{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}{% for i in [1] %}{% set x = 3 %}{{ x }}{% endfor %}{{ x }}{% with y = 5 %}{{ y }}{% endwith %}{{ y is defined }}",
    "generation-scope": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "attributes": "{{ messages[0]['role'] }}{{ messages[0].content.strip() }}{{ messages.0.role }}{{ messages | map(attribute='role') | list }}{{ (messages | first).role }}{{ messages[2].tool_calls[0].function.name }}{{ messages[2].tool_calls[0]['function']['arguments'].z }}",
    "kinds": "{% for x in ['a', '', [1], {'a': 1}, none, 1, 1.5, true, nothing] %}{{ x is sequence }} {{ x is iterable }} {{ x is mapping }} {{ x is string }}|{% endfor %}{% if tools is iterable and tools | length > 0 %}tools{% endif %}{{ nothing is iterable }}{{ messages is sequence }}{{ messages[1].content is iterable }}",
    "titles": "{{ \"they're bill's 2nd été\".title() }}{{ 'hELLO wORLD'.title() }}{{ ''.title() }}{{ \"it's\" | title }}{{ '<a href=\"x\">it\\'s &' | e }}{{ '</' | escape }}{{ 3 | e }}",
    "raise": "{% if messages[0].role != 'user' %}{{ raise_exception('The first message must be from the user, not ' ~ messages[0].role) }}{% endif %}",
}

out = []
for name, template in TEMPLATES.items():
    kwargs = dict(bos_token="<bos>", eos_token="<eos>", enable_thinking=True)
    case = {"name": name, "template": template}
    marks = "{% generation" in template or "{%- generation" in template
    try:
        text, spans = render_jinja_template(
            [_normalize_chat_messages(MESSAGES)], tools=TOOLS if name in ("tools",) else None, chat_template=template,
            return_assistant_tokens_mask=marks, add_generation_prompt=name == "tokens", **kwargs)
        case["text"] = text[0]
        if marks:  # characters to bytes
            case["generated"] = [[len(text[0][:a].encode()), len(text[0][:b].encode())] for a, b in spans[0]]
    except Exception as e:
        case["error"] = str(e)
    out.append(case)
path = Path(__file__).parent / "data" / "templates.json"
path.write_text(json.dumps({"messages": MESSAGES, "tools": TOOLS, "cases": out}, ensure_ascii=False, indent=1))
for case in out:
    print(case["name"], repr(case.get("text", case.get("error")))[:300], case.get("generated", ""))
