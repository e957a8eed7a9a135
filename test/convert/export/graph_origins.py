"""Follows every tensor of an ONNX graph from where its numbers come from to where they are used.

A tensor's origin is a set of roles: which inputs, positions, angles or matrix products its numbers
were moved, added or multiplied together from. Origins say which half tensor may go where; the rules
are those of `graph_walk.py`. A faulty tensor has no origin, so that a fault is reported once, where
it is made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from vla_convert.export.onnx.precision import HALVES, MOVES, in_words, node_fault, type_name

# Parameters that may be in half: `matrix_names` of models/blocks/layers.py without the
# biases, which are added in float32.
_HALF_MATRICES = re.compile(
    r'(vision|language|expert)\.blocks\.\d+'
    r'\.(attention\.(q|k|v|out)|mlp\.(gate|up|down|fc1|fc2))\.weight'
    r'|vision\.projector\.weight|language\.embedding\.weight'
    # An encoder without vision blocks, and a decoder that reads it.
    r'|(encoder|decoder)\.\d+\.(((self_|cross_)?attention)\.(q|k|v|out)|mlp\.(fc1|fc2))\.weight'
    # A head of attention blocks, what lies between vision and language, a layer over all actions.
    r'|(blocks|context|dit)\.\d+\.(attention\.(q|k|v|out)|mlp\.(fc1|fc2))\.weight'
    r'|vision\.(projector|merger|deepstack\.\d+)\.(fc1|fc2)\.weight|pool\.weight'
    # Behind the norm with which it begins.
    r'|vision\.connector\.[13]\.weight'
)
TEXT_TABLE = 'language.embedding.weight'
_PROJECTION = re.compile(r'[._](?:self_|cross_)?attention\.([qkv])\.weight$')

# Operators that mix the numbers of their operands, and that compute something else altogether, in
# float32 or in integers.
_MIXES = ('Add', 'Div', 'Mul', 'Neg', 'Pow', 'Sub', 'Where')
_COMPUTES = (
    'And',
    'Conv',
    'Cos',
    'Erf',
    'LayerNormalization',
    'MatMul',
    'MaxPool',
    'Or',
    'ReduceMean',
    'ReduceSum',
    'Reciprocal',
    'Relu',
    'Sigmoid',
    'Sin',
    'Softmax',
    'Sqrt',
    'Tanh',
)


@dataclass(frozen=True)
class Origin:
    """Origin of a tensor's numbers.

    Attributes:
        roles: the words below; none for a constant.
        matrices: names of the bundle's matrices that stand side by side in a half weight, and in
            the product of one.
        rounded: True for a tensor that was float32 before it was half.
        by_head: True where the products of several matrices lie side by side as heads, (…, D), and
            no longer in one row.
    """

    roles: frozenset[str] = frozenset()
    matrices: tuple[str, ...] = ()
    rounded: bool = False
    by_head: bool = False

    def within(self, *roles: str) -> bool:
        return self.roles <= set(roles)

    def __str__(self) -> str:
        words = ' and '.join(sorted(self.roles)) or 'a constant'
        return f'{words}, rounded' if self.rounded else words


def _of(*roles: str) -> Origin:
    return Origin(frozenset(roles))


_INPUT, _POSITIONS, _ANGLES = 'an input', 'positions', 'rotary angles'
_COMPUTED, _SOFTMAX = 'float32 results', 'attention weights'
_HIDING = 'terms that hide keys'
_CONSTANT = 'a constant that is no matrix of attention, MLP or projector'
_MATRIX, _TABLE, _PRODUCT = 'a matrix', 'text embeddings', 'a product'
_QUERIES, _KEYS, _VALUES = 'queries', 'keys', 'values'
# Half operands of scores, in float32 for their product.
_WIDE_QUERIES, _WIDE_KEYS = 'widened queries', 'widened keys'
# What a prefix hands over in half, by the end of its name.
_PAST = {'_key': 'past keys', '_value': 'past values'}
_PAST_KEYS, _PAST_VALUES = _PAST.values()
_PROJECTED = {'q': _QUERIES, 'k': _KEYS, 'v': _VALUES}
_PRODUCTS = (_PRODUCT, _QUERIES, _KEYS, _VALUES)
# Axis of a head's numbers in (B, heads, T, D) and (B, T, heads, D).
_WITHIN_A_HEAD = 3


def is_half_matrix(name: str) -> bool:
    """Return whether this names a parameter that may be in half, or several of them (`a+b`)."""
    return all(_HALF_MATRICES.fullmatch(part) for part in name.split('+'))


def origin_faults(
    graph: onnx.GraphProto, types: Mapping[str, int], columns: Mapping[str, int]
) -> list[str]:
    """List uses of a tensor that do not fit the origin of its numbers.

    Args:
        graph: with nodes in the order in which they run.
        types: type of every tensor, as ONNX numbers them.
        columns: by the names of the bundle's matrices, how many numbers a product by each has.

    Returns:
        A sentence a fault, naming node and tensor.
    """
    walk = _Walk(types, columns)
    walk.run(graph)
    return walk.faults


class _Walk:
    """The state of one walk."""

    def __init__(self, types: Mapping[str, int], columns: Mapping[str, int]) -> None:
        self.faults: list[str] = []
        self._types, self._columns = types, columns
        # Constants that nodes take as sizes, by name.
        self._sizes: dict[str, np.ndarray] = {}
        # Of every tensor so far, by name; an input that is left out is called ''.
        self._origins: dict[str, Origin | None] = {}
        self._where = ''

    def run(self, graph: onnx.GraphProto) -> None:
        """Walk all nodes in order."""
        self._origins[''] = Origin()
        for tensor in graph.initializer:
            self._origins[tensor.name] = self._of_initializer(tensor)
            if tensor.data_type == TensorProto.INT64 and not tensor.external_data:
                self._sizes[tensor.name] = numpy_helper.to_array(tensor)
        for port in graph.input:
            self._origins.setdefault(port.name, self._of_input(port.name))
        for node in graph.node:
            self._where = f"node '{node.name or node.output[0]}' ({node.op_type})"
            made = self._of_node(node)
            origins = made if len(made) == len(node.output) else made[:1] * len(node.output)
            self._origins |= {
                name: origin for name, origin in zip(node.output, origins, strict=True) if name
            }
        for port in graph.output:
            self._check_output(port.name)

    def _kind(self, name: str) -> int:
        return self._types.get(name, TensorProto.UNDEFINED)

    def _is_half(self, name: str) -> bool:
        return self._kind(name) in HALVES

    def _fault(self, text: str) -> None:
        self.faults.append(f'{self._where} {text}')

    # --- where numbers come from --------------------------------------------------------------

    def _of_initializer(self, tensor: onnx.TensorProto) -> Origin:
        if tensor.data_type not in HALVES:
            return Origin()
        if is_half_matrix(tensor.name):
            role = _TABLE if tensor.name == TEXT_TABLE else _MATRIX
            return Origin(frozenset({role}), tuple(tensor.name.split('+')))
        return _of(_CONSTANT)

    def _of_input(self, name: str) -> Origin | None:
        if self._is_half(name):
            # Another one is the ports' own fault.
            past = _past_role(name)
            return _of(past) if past else None
        return _of(_INPUT) if self._kind(name) == TensorProto.FLOAT else Origin()

    # --- where they go ------------------------------------------------------------------------

    def _of_node(self, node: onnx.NodeProto) -> list[Origin | None]:
        """Return the origins of a node's outputs, or a single one that all of them share."""
        unknown = [name for name in (*node.input, *node.output) if name and not self._kind(name)]
        if unknown:
            self._fault(f"works on '{unknown[0]}', whose type is unknown")
        elif node_fault(node, self._types):
            # It breaks a rule of types, which is reported as such.
            pass
        elif node.op_type == 'Cast':
            return [self._of_cast(node.input[0], node.output[0])]
        elif self._misuses_hiding_terms(node):
            self._fault('goes on with floats made of a mask: count in integers')
        elif self._misuses_operands_of_scores(node):
            self._fault(
                'takes what was in half before and was widened for the product of queries and '
                'keys; nothing else may go on with it in float32'
            )
        elif node.op_type in MOVES:
            return self._of_move(node)
        elif node.op_type == 'MatMul' and self._is_half(node.output[0]):
            return [self._of_half_product(node)]
        elif node.op_type in _MIXES:
            return [self._of_mix(node)]
        elif node.op_type in _COMPUTES:
            return [self._of_result(node)]
        else:
            self._fault('is an operator that no policy is exported with, so it has no rule here')
        return [None]

    def _misuses_hiding_terms(self, node: onnx.NodeProto) -> bool:
        """Return whether floats made of a mask go anywhere but onto float32 results, as scores."""
        origins = [self._origins[name] for name in node.input]
        roles = [origin.roles for origin in origins if origin is not None and origin.roles]
        if not any(_HIDING in found for found in roles) or node.op_type in MOVES:
            return False
        return node.op_type != 'Add' or sorted(map(sorted, roles)) != [[_COMPUTED], [_HIDING]]

    def _misuses_operands_of_scores(self, node: onnx.NodeProto) -> bool:
        """Return whether widened queries or keys go anywhere but into their product."""
        origins = [self._origins[name] for name in node.input]
        roles = [origin.roles for origin in origins if origin is not None]
        if not any({_WIDE_QUERIES, _WIDE_KEYS} & found for found in roles):
            return False
        if node.op_type != 'MatMul' or len(roles) != 2:
            return True
        return not (roles[0] <= {_WIDE_QUERIES, _QUERIES} and roles[1] <= {_WIDE_KEYS, _KEYS})

    def _of_cast(self, source: str, target: str) -> Origin | None:
        """Origin after a cast; between float32 and half the tensor's origin decides if it may."""
        kind, made, origin = self._kind(source), self._kind(target), self._origins[source]
        change = f'{in_words(source, self._types)} to {in_words(target, self._types)}'
        if made == TensorProto.FLOAT and kind == TensorProto.INT64:
            return _of(_POSITIONS)
        if origin is None or (made in HALVES) == (kind in HALVES):
            return origin
        if made in HALVES:
            if not origin.within(_INPUT, _POSITIONS, _ANGLES):
                return replace(origin, rounded=True)
            self._fault(f'rounds {change}: {origin} must stay in float32')
        elif not origin.rounded and origin.within(*_PRODUCTS, _TABLE):
            return origin
        elif _are_rotated(origin, _QUERIES):
            return _of(_WIDE_QUERIES)
        elif _are_keys(origin) or _are_rotated(origin, _KEYS):
            return _of(_WIDE_KEYS)
        else:
            self._fault(
                f'widens {change}: only a product or a text embedding is made in half, and this is '
                f'{origin}; what goes on in float32 must not have been in half before'
            )
        return None

    def _of_move(self, node: onnx.NodeProto) -> list[Origin | None]:
        moved = node.input if node.op_type == 'Concat' else node.input[:1]
        origin = self._joined(moved)
        if origin is None or len(origin.matrices) < 2 or _MATRIX in origin.roles:
            return [origin]
        if node.op_type == 'Reshape':
            return [replace(origin, by_head=True)]
        if node.op_type == 'Split':
            return [*self._parts(node, origin)]
        return [origin]

    def _parts(self, node: onnx.NodeProto, origin: Origin) -> list[Origin]:
        """Origins of the parts of products that lie side by side."""
        (axis,) = (item.i for item in node.attribute if item.name == 'axis')
        if origin.by_head and axis == _WITHIN_A_HEAD:
            return [origin]
        sizes = self._sizes[node.input[1]]
        widths = np.array([self._columns[name] for name in origin.matrices])
        # Where the parts and the products end, as shares of the whole.
        ends, found = np.cumsum(sizes) * widths.sum(), np.cumsum(widths) * sizes.sum()
        places = [0, *(int(np.searchsorted(found, end)) + 1 for end in ends)]
        if not set(ends) <= set(found):
            return [origin]
        names = [origin.matrices[start:end] for start, end in pairwise(places)]
        others = origin.roles - {*_PRODUCTS}
        return [
            replace(origin, roles=_product(part).roles | others, matrices=part) for part in names
        ]

    def _joined(self, names: Sequence[str]) -> Origin | None:
        """The origin of something made of all of these; None if one of them is at fault."""
        origins = [self._origins[name] for name in names]
        known = [origin for origin in origins if origin is not None]
        if len(known) < len(origins):
            return None
        # A constant, such as a bias, changes nothing about whose product this is.
        matrices = {origin.matrices for origin in known if origin.roles - {_ANGLES}}
        return Origin(
            frozenset().union(*(origin.roles for origin in known)),
            matrices.pop() if len(matrices) == 1 else (),
            any(origin.rounded for origin in known),
            any(origin.by_head for origin in known),
        )

    def _of_half_product(self, node: onnx.NodeProto) -> Origin | None:
        """Origin of a half matrix product, which must be one of the two allowed."""
        left, right = (self._origins[name] for name in node.input)
        if left is None or right is None:
            return None
        if right.roles == {_MATRIX} and right.matrices and _MATRIX not in left.roles:
            return _product(right.matrices)
        if left.roles == {_SOFTMAX} and _are_values(right):
            return _of(_PRODUCT)
        self._fault(
            f"multiplies '{node.input[0]}' ({left}) by '{node.input[1]}' ({right}) in "
            f'{type_name(self._kind(node.output[0]))}; only products by a matrix of the bundle and '
            'of attention weights and values may be'
        )
        return None

    def _of_mix(self, node: onnx.NodeProto) -> Origin | None:
        floats = [name for name in node.input if self._kind(name) == TensorProto.FLOAT]
        if not floats:
            return Origin()
        origin = self._joined(floats)
        if origin is not None and node.op_type == 'Where' and not origin.roles:
            return _of(_HIDING)
        if origin is not None and _HIDING in origin.roles:
            return _of(_COMPUTED)
        return origin

    def _of_result(self, node: onnx.NodeProto) -> Origin | None:
        out = node.output[0]
        if node.op_type == 'Softmax':
            return _of(_SOFTMAX)
        if node.op_type in ('Cos', 'Sin'):
            origin = self._origins[node.input[0]]
            if origin is not None and origin.roles != {_POSITIONS}:
                self._fault(
                    f"makes rotary angles of '{node.input[0]}' ({origin}); they must be integer "
                    'positions times constants'
                )
            return _of(_ANGLES)
        if node.op_type == 'LayerNormalization':
            inside = [item.i for item in node.attribute if item.name == 'stash_type']
            if inside and inside[0] != TensorProto.FLOAT:
                self._fault(f"norms '{out}' in {type_name(inside[0])} (its stash_type) inside")
        return _of(_COMPUTED) if self._kind(out) == TensorProto.FLOAT else Origin()

    def _check_output(self, name: str) -> None:
        origin = self._origins.get(name, Origin())
        past = _past_role(name)
        if origin is None or past is None or not self._is_half(name):
            return
        if not (_are_keys(origin) if past == _PAST_KEYS else _are_values(origin)):
            self.faults.append(f"the output '{name}' is {origin}, in {type_name(self._kind(name))}")


def _product(matrices: tuple[str, ...]) -> Origin:
    """Origin of the product by matrices that stand side by side."""
    found = [_PROJECTION.search(name) for name in matrices]
    roles = {_PROJECTED[match[1]] if match else _PRODUCT for match in found}
    return Origin(frozenset(roles), matrices)


def _past_role(name: str) -> str | None:
    return next((role for end, role in _PAST.items() if name.endswith(end)), None)


def _are_rotated(origin: Origin, role: str) -> bool:
    """Return whether these are queries (or keys) that were float32 in between.

    They are rotated there, and some are divided by their own norm before. Constant angles, of
    positions that no prompt changes, leave no role.
    """
    return origin.rounded and role in origin.roles and origin.within(role, _ANGLES, _COMPUTED)


def _are_keys(origin: Origin) -> bool:
    return origin.within(_KEYS, _ANGLES, _PAST_KEYS) and not origin.within(_ANGLES)


def _are_values(origin: Origin) -> bool:
    # Those of a projection with a bias are float32 until their product.
    return bool(origin.roles) and origin.within(_VALUES, _PAST_VALUES)
