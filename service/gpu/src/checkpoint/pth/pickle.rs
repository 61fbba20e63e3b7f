//! The subset of the pickle format that state dicts use. Source: the opcode descriptions in Python's `pickletools`.
//!
//! A pickle is a program for a small stack machine. This machine supports dicts, tuples, text, numbers, and the four
//! calls by which PyTorch describes tensors; everything else is rejected by name, and nothing is ever executed.
//! Values are stored in one list and refer to each other by index: none is copied or dropped recursively, and a
//! self-referential value is harmless.

use std::collections::HashMap;

use super::Problem;
use crate::load::Stored;

/// Maximum of values. A tensor takes about 25.
const MAX_VALUES: usize = 1 << 20;
/// Maximum stack depth.
const MAX_STACK_DEPTH: usize = 1 << 20;
/// Maximum of open marks: the nesting depth.
const MAX_MARK_DEPTH: usize = 1000;
/// Maximum of dimensions of a tensor: PyTorch's own limit.
const MAX_DIMENSIONS: usize = 64;
/// The newest supported protocol.
const PROTOCOL: u8 = 5;

/// A value of the machine. Indices refer to other values.
pub(super) enum Value<'a> {
    /// Ignored values: floats, lists, bytes, None, sets.
    Other,
    Bool,
    Int(i64),
    Text(&'a str),
    Tuple(Box<[u32]>),
    /// In insertion order.
    Dict(Vec<(u32, u32)>),
    Global(Global),
    Storage(Box<Storage<'a>>),
    Tensor(Box<Tensor>),
}

/// The global names that a pickle may use.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Global {
    OrderedDict,
    /// `torch._utils._rebuild_tensor_v2`: storage, offset, shape, strides, and ignored arguments.
    Tensor,
    /// `torch._utils._rebuild_tensor_v3`: the same, with a dtype as the seventh argument.
    TensorOfType,
    /// `torch._utils._rebuild_parameter`: a tensor, and ignored arguments.
    Parameter,
    Storage(ElementType),
    Element(ElementType),
}

/// Element type of a tensor or a storage.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum ElementType {
    Read(Stored),
    /// An unsupported type, by PyTorch's name. A storage may be untyped, with the type in its tensors.
    Unread(&'static str),
}

/// One entry of the archive.
pub(super) struct Storage<'a> {
    pub(super) element: ElementType,
    pub(super) key: &'a str,
    /// In elements; in bytes if untyped.
    pub(super) length: u64,
}

/// A view of a storage.
pub(super) struct Tensor {
    pub(super) storage: u32,
    /// In elements.
    pub(super) offset: u64,
    pub(super) shape: u32,
    pub(super) strides: u32,
    /// Set if the storage is untyped.
    pub(super) element: Option<ElementType>,
}

/// A completely read pickle.
pub(super) struct Pickle<'a> {
    values: Vec<Value<'a>>,
    outermost: u32,
}

impl<'a> Pickle<'a> {
    pub(super) fn read(bytes: &'a [u8]) -> Result<Pickle<'a>, Problem> {
        let mut machine = Machine {
            bytes,
            position: 0,
            values: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        };
        while machine.step()? {}
        let outermost = machine.pop()?;
        Ok(Pickle {
            values: machine.values,
            outermost,
        })
    }

    pub(super) fn outermost(&self) -> u32 {
        self.outermost
    }

    pub(super) fn value(&self, index: u32) -> &Value<'a> {
        &self.values[index as usize]
    }

    /// A tuple of non-negative numbers.
    pub(super) fn dimensions(&self, index: u32) -> Option<Vec<u64>> {
        let Value::Tuple(items) = self.value(index) else {
            return None;
        };
        if items.len() > MAX_DIMENSIONS {
            return None;
        }
        let number = |item: &u32| match self.value(*item) {
            Value::Int(number) => u64::try_from(*number).ok(),
            _ => None,
        };
        items.iter().map(number).collect()
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    position: usize,
    values: Vec<Value<'a>>,
    stack: Vec<u32>,
    /// Stack heights.
    marks: Vec<usize>,
    memo: HashMap<u32, u32>,
}

impl<'a> Machine<'a> {
    /// Executes one opcode; `false` after the last.
    fn step(&mut self) -> Result<bool, Problem> {
        let at = self.position;
        let [opcode] = self.array()?;
        match opcode {
            b'.' => return Ok(false),
            0x80 => {
                let [protocol] = self.array()?;
                if protocol > PROTOCOL {
                    return Err(Problem::Unsupported(format!(
                        "its pickle has protocol {protocol}; up to {PROTOCOL} is read"
                    )));
                }
            }
            0x95 => {
                self.array::<8>()?; // a frame: only how the bytes were buffered
            }
            // The stack.
            b'(' => {
                if self.marks.len() == MAX_MARK_DEPTH {
                    return Err(Problem::Damaged(format!(
                        "its pickle nests more than {MAX_MARK_DEPTH} deep"
                    )));
                }
                self.marks.push(self.stack.len());
            }
            b'0' => {
                self.pop()?;
            }
            b'1' => {
                self.pop_to_mark()?;
            }
            b'2' => {
                let top = self.top()?;
                self.push_index(top)?;
            }
            // The memo.
            b'q' => {
                let [index] = self.array()?;
                self.remember(u32::from(index))?;
            }
            b'r' => {
                let index = u32::from_le_bytes(self.array()?);
                self.remember(index)?;
            }
            0x94 => {
                // Bounded by the number of values.
                let index = u32::try_from(self.memo.len()).unwrap_or(u32::MAX);
                self.remember(index)?;
            }
            b'h' => {
                let [index] = self.array()?;
                self.recall(u32::from(index))?;
            }
            b'j' => {
                let index = u32::from_le_bytes(self.array()?);
                self.recall(index)?;
            }
            // Single values.
            b'N' => self.push(Value::Other)?,
            0x88 | 0x89 => self.push(Value::Bool)?,
            b'J' => {
                let number = i32::from_le_bytes(self.array()?);
                self.push(Value::Int(number.into()))?;
            }
            b'K' => {
                let [number] = self.array()?;
                self.push(Value::Int(number.into()))?;
            }
            b'M' => {
                let number = u16::from_le_bytes(self.array()?);
                self.push(Value::Int(number.into()))?;
            }
            0x8a => {
                let [length] = self.array()?;
                self.long(u64::from(length))?;
            }
            0x8b => {
                let length = u32::from_le_bytes(self.array()?);
                self.long(u64::from(length))?;
            }
            b'G' => {
                self.array::<8>()?;
                self.push(Value::Other)?;
            }
            0x8c | b'U' => {
                let [length] = self.array()?;
                self.text(u64::from(length))?;
            }
            b'X' | b'T' => {
                let length = u32::from_le_bytes(self.array()?);
                self.text(u64::from(length))?;
            }
            0x8d => {
                let length = u64::from_le_bytes(self.array()?);
                self.text(length)?;
            }
            b'C' => {
                let [length] = self.array()?;
                self.other_bytes(u64::from(length))?;
            }
            b'B' => {
                let length = u32::from_le_bytes(self.array()?);
                self.other_bytes(u64::from(length))?;
            }
            0x8e => {
                let length = u64::from_le_bytes(self.array()?);
                self.other_bytes(length)?;
            }
            // Tuples.
            b')' => self.push(Value::Tuple(Box::new([])))?,
            0x85..=0x87 => {
                let items = self.pop_many(usize::from(opcode - 0x84))?;
                self.push(Value::Tuple(items))?;
            }
            b't' => {
                let items = self.pop_to_mark()?;
                self.push(Value::Tuple(items))?;
            }
            // Lists and sets, whose elements are ignored.
            b']' | 0x8f => self.push(Value::Other)?,
            b'l' | 0x91 => {
                self.pop_to_mark()?;
                self.push(Value::Other)?;
            }
            b'a' => {
                self.pop()?;
                self.top()?;
            }
            b'e' | 0x90 => {
                self.pop_to_mark()?;
                self.top()?;
            }
            // Dicts.
            b'}' => self.push(Value::Dict(Vec::new()))?,
            b'd' => {
                let items = self.pop_to_mark()?;
                self.push(Value::Dict(Vec::new()))?;
                self.set(&items)?;
            }
            b's' => {
                let items = self.pop_many(2)?;
                self.set(&items)?;
            }
            b'u' => {
                let items = self.pop_to_mark()?;
                self.set(&items)?;
            }
            // Names and calls.
            b'c' => {
                let module = self.line()?;
                let name = self.line()?;
                self.global(module, name)?;
            }
            0x93 => {
                let items = self.pop_many(2)?;
                let (Value::Text(module), Value::Text(name)) = (self.value(items[0]), self.value(items[1]))
                else {
                    return Err(self.damaged(at, "asks for a name that is no text"));
                };
                let (module, name) = (*module, *name);
                self.global(module, name)?;
            }
            b'R' => {
                let items = self.pop_many(2)?;
                self.call(at, items[0], items[1])?;
            }
            // The state of an object: for an ordered dict, attributes in addition to the tensors.
            b'b' => {
                self.pop()?;
                if !matches!(self.value(self.top()?), Value::Dict(_)) {
                    return Err(Problem::Unsupported(
                        "its pickle sets the state of an object that is no dict".to_owned(),
                    ));
                }
            }
            b'Q' => {
                let id = self.pop()?;
                let storage = self
                    .storage(id)
                    .ok_or_else(|| self.damaged(at, "refers to something that is no storage"))?;
                self.push(Value::Storage(Box::new(storage)))?;
            }
            other => {
                return Err(Problem::Unsupported(format!(
                    "its pickle has the opcode {other:#04x} at byte {at}, which no state dict needs"
                )));
            }
        }
        Ok(true)
    }

    fn damaged(&self, at: usize, what: &str) -> Problem {
        Problem::Damaged(format!("its pickle {what}, at byte {at}"))
    }

    fn slice(&mut self, length: u64) -> Result<&'a [u8], Problem> {
        let rest = &self.bytes[self.position..];
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let slice = rest
            .get(..length)
            .ok_or_else(|| self.damaged(self.position, "ends in the middle of a value"))?;
        self.position += length;
        Ok(slice)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Problem> {
        let mut array = [0; N];
        array.copy_from_slice(self.slice(N as u64)?);
        Ok(array)
    }

    /// Text up to the end of the line.
    fn line(&mut self) -> Result<&'a str, Problem> {
        let rest = &self.bytes[self.position..];
        let length = rest.iter().position(|&byte| byte == b'\n');
        let length = length.ok_or_else(|| self.damaged(self.position, "ends in the middle of a name"))?;
        let line = self.utf8(length as u64)?;
        self.position += 1;
        Ok(line)
    }

    fn utf8(&mut self, length: u64) -> Result<&'a str, Problem> {
        let at = self.position;
        std::str::from_utf8(self.slice(length)?).map_err(|_| self.damaged(at, "has text that is not UTF-8"))
    }

    fn text(&mut self, length: u64) -> Result<(), Problem> {
        let text = self.utf8(length)?;
        self.push(Value::Text(text))
    }

    fn other_bytes(&mut self, length: u64) -> Result<(), Problem> {
        self.slice(length)?;
        self.push(Value::Other)
    }

    /// An integer of any length; more than 64 bits are ignored.
    fn long(&mut self, length: u64) -> Result<(), Problem> {
        let bytes = self.slice(length)?;
        let value = if bytes.len() > 8 {
            Value::Other
        } else {
            let negative = bytes.last().is_some_and(|top| top & 0x80 != 0);
            let mut wide = [if negative { 0xff } else { 0 }; 8];
            wide[..bytes.len()].copy_from_slice(bytes);
            Value::Int(i64::from_le_bytes(wide))
        };
        self.push(value)
    }

    fn value(&self, index: u32) -> &Value<'a> {
        &self.values[index as usize]
    }

    fn push(&mut self, value: Value<'a>) -> Result<(), Problem> {
        if self.values.len() == MAX_VALUES {
            return Err(Problem::Damaged(format!(
                "its pickle makes more than {MAX_VALUES} values"
            )));
        }
        let index = self.values.len() as u32;
        self.values.push(value);
        self.push_index(index)
    }

    fn push_index(&mut self, index: u32) -> Result<(), Problem> {
        if self.stack.len() == MAX_STACK_DEPTH {
            return Err(Problem::Damaged(format!(
                "its pickle stacks more than {MAX_STACK_DEPTH} values"
            )));
        }
        self.stack.push(index);
        Ok(())
    }

    /// The lowest height that may be popped to: values below the last mark belong to an outer construct.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn top(&self) -> Result<u32, Problem> {
        match self.stack.last() {
            Some(top) if self.stack.len() > self.floor() => Ok(*top),
            _ => Err(self.damaged(self.position, "takes a value that is not there")),
        }
    }

    fn pop(&mut self) -> Result<u32, Problem> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    /// The last `count` values, in order.
    fn pop_many(&mut self, count: usize) -> Result<Box<[u32]>, Problem> {
        if self.stack.len() - self.floor() < count {
            return Err(self.damaged(self.position, "takes a value that is not there"));
        }
        Ok(self.stack.split_off(self.stack.len() - count).into())
    }

    fn pop_to_mark(&mut self) -> Result<Box<[u32]>, Problem> {
        match self.marks.pop() {
            Some(mark) => Ok(self.stack.split_off(mark).into()),
            None => Err(self.damaged(self.position, "ends a group that it did not begin")),
        }
    }

    fn remember(&mut self, index: u32) -> Result<(), Problem> {
        let top = self.top()?;
        if self.memo.len() == MAX_VALUES {
            return Err(Problem::Damaged(format!(
                "its pickle remembers more than {MAX_VALUES} values"
            )));
        }
        self.memo.insert(index, top);
        Ok(())
    }

    fn recall(&mut self, index: u32) -> Result<(), Problem> {
        let known = self.memo.get(&index).copied();
        let value = known.ok_or_else(|| self.damaged(self.position, "recalls what it did not remember"))?;
        self.push_index(value)
    }

    /// Inserts alternating keys and values into the dict on top.
    fn set(&mut self, items: &[u32]) -> Result<(), Problem> {
        let position = self.position;
        let broken = |what| Problem::Damaged(format!("its pickle {what}, at byte {position}"));
        let top = self.top()?;
        let (pairs, rest) = items.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(broken("sets a key without a value"));
        }
        match &mut self.values[top as usize] {
            Value::Dict(entries) => entries.extend(pairs.iter().map(|[key, value]| (*key, *value))),
            _ => return Err(broken("sets a key in something that is no dict")),
        }
        Ok(())
    }

    fn global(&mut self, module: &'a str, name: &'a str) -> Result<(), Problem> {
        let global = known(module, name).ok_or_else(|| {
            let asked: String = format!("{module}.{name}").chars().take(100).collect();
            Problem::Unsupported(format!(
                "its pickle asks for {asked:?}, which no state dict needs, and nothing is executed: load it in \
                 PyTorch, if you trust it, and save model.state_dict()"
            ))
        })?;
        self.push(Value::Global(global))
    }

    /// Result of calling a known name with these arguments.
    fn call(&mut self, at: usize, function: u32, arguments: u32) -> Result<(), Problem> {
        let (Value::Global(function), Value::Tuple(arguments)) =
            (self.value(function), self.value(arguments))
        else {
            return Err(self.damaged(at, "calls something that is no function"));
        };
        let value = match (function, &**arguments) {
            (Global::OrderedDict, []) => Value::Dict(Vec::new()),
            (Global::Parameter, [tensor, ..]) if matches!(self.value(*tensor), Value::Tensor(_)) => {
                return self.push_index(*tensor);
            }
            (Global::Tensor | Global::TensorOfType, [storage, offset, shape, strides, rest @ ..]) => {
                let element = match (function, rest) {
                    (Global::Tensor, _) => None,
                    (_, [_, _, element, ..]) => match self.value(*element) {
                        Value::Global(Global::Element(element)) => Some(*element),
                        _ => return Err(self.damaged(at, "makes a tensor of a type that is none")),
                    },
                    _ => return Err(self.damaged(at, "makes a tensor without a type")),
                };
                let offset = match self.value(*offset) {
                    Value::Int(offset) => u64::try_from(*offset).ok(),
                    _ => None,
                };
                let offset = offset.ok_or_else(|| self.damaged(at, "makes a tensor that begins nowhere"))?;
                Value::Tensor(Box::new(Tensor {
                    storage: *storage,
                    offset,
                    shape: *shape,
                    strides: *strides,
                    element,
                }))
            }
            _ => return Err(self.damaged(at, "calls a function with arguments that it does not take")),
        };
        self.push(value)
    }

    /// The storage of a persistent id: `("storage", class, key, location, length)`.
    fn storage(&self, id: u32) -> Option<Storage<'a>> {
        let Value::Tuple(parts) = self.value(id) else {
            return None;
        };
        let [what, class, key, _, length, ..] = **parts else {
            return None;
        };
        match [what, class, key, length].map(|part| self.value(part)) {
            [
                Value::Text("storage"),
                Value::Global(Global::Storage(element)),
                Value::Text(key),
                Value::Int(length),
            ] => Some(Storage {
                element: *element,
                key,
                length: u64::try_from(*length).ok()?,
            }),
            _ => None,
        }
    }
}

/// Resolves a global name; unknown names are never looked up.
fn known(module: &str, name: &str) -> Option<Global> {
    Some(match (module, name) {
        ("collections", "OrderedDict") => Global::OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2") => Global::Tensor,
        ("torch._utils", "_rebuild_tensor_v3") => Global::TensorOfType,
        ("torch._utils", "_rebuild_parameter") => Global::Parameter,
        ("torch.storage" | "torch", "UntypedStorage") => Global::Storage(ElementType::Unread("plain bytes")),
        ("torch", name) => match name.strip_suffix("Storage") {
            Some(class) => Global::Storage(storage_class(class)?),
            None => Global::Element(dtype(name)?),
        },
        _ => return None,
    })
}

fn storage_class(class: &str) -> Option<ElementType> {
    Some(match class {
        "Float" => ElementType::Read(Stored::F32),
        "Half" => ElementType::Read(Stored::F16),
        "BFloat16" => ElementType::Read(Stored::Bf16),
        "Double" => ElementType::Read(Stored::F64),
        "Byte" => ElementType::Read(Stored::U8),
        "Char" => ElementType::Read(Stored::I8),
        "Long" => ElementType::Read(Stored::I64),
        "Int" => ElementType::Unread("int32"),
        "Short" => ElementType::Unread("int16"),
        "Bool" => ElementType::Unread("bool"),
        "ComplexFloat" => ElementType::Unread("complex64"),
        "ComplexDouble" => ElementType::Unread("complex128"),
        "QInt8" => ElementType::Unread("qint8"),
        "QUInt8" => ElementType::Unread("quint8"),
        "QInt32" => ElementType::Unread("qint32"),
        _ => return None,
    })
}

fn dtype(name: &str) -> Option<ElementType> {
    Some(match name {
        "float32" => ElementType::Read(Stored::F32),
        "float16" => ElementType::Read(Stored::F16),
        "bfloat16" => ElementType::Read(Stored::Bf16),
        "float64" => ElementType::Read(Stored::F64),
        "uint8" => ElementType::Read(Stored::U8),
        "int8" => ElementType::Read(Stored::I8),
        "int64" => ElementType::Read(Stored::I64),
        "float8_e4m3fn" => ElementType::Read(Stored::F8E4M3),
        "float8_e5m2" => ElementType::Read(Stored::F8E5M2),
        "float8_e4m3fnuz" => ElementType::Unread("float8_e4m3fnuz"),
        "float8_e5m2fnuz" => ElementType::Unread("float8_e5m2fnuz"),
        "float8_e8m0fnu" => ElementType::Unread("float8_e8m0fnu"),
        "float4_e2m1fn_x2" => ElementType::Unread("float4_e2m1fn_x2"),
        "uint16" => ElementType::Unread("uint16"),
        "uint32" => ElementType::Unread("uint32"),
        "uint64" => ElementType::Unread("uint64"),
        "int16" => ElementType::Unread("int16"),
        "int32" => ElementType::Unread("int32"),
        "bool" => ElementType::Unread("bool"),
        "complex32" => ElementType::Unread("complex32"),
        "complex64" => ElementType::Unread("complex64"),
        "complex128" => ElementType::Unread("complex128"),
        _ => return None,
    })
}
