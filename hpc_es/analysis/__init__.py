"""Tables, figures and reports of recorded runs. Works on a laptop, without torch.

Three rooms, each of which may import those before it: `statistics` has the numbers, `figures` draws them, and `report`
puts both on a page. `tools/check_imports.py` enforces the order.
"""
