//! An operation graph for cuDNN, from its tensors to an executable plan.

use super::descriptor::{Descriptor, Value, kind};
use super::plan::{CompileTarget, Plan};
use super::{Failure, Library, Outcome};

/// Data types, by cuDNN's numbering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataType {
    F32 = 0,
    F16 = 2,
    I32 = 4,
    Bf16 = 9,
    Flag = 11,
    E4m3 = 12,
}

impl DataType {
    /// The type of a dtype, if it is used with cuDNN here.
    pub(super) fn of(dtype: candle_core::DType) -> Option<DataType> {
        match dtype {
            candle_core::DType::F32 => Some(DataType::F32),
            candle_core::DType::F16 => Some(DataType::F16),
            candle_core::DType::BF16 => Some(DataType::Bf16),
            _ => None,
        }
    }
}

/// Pointwise modes, by cuDNN's numbering.
#[derive(Clone, Copy)]
pub(super) enum Pointwise {
    Add = 0,
    Multiply = 1,
    Divide = 6,
    Subtract = 9,
    Exp = 13,
    Log = 15,
    Greater = 302,
    GreaterOrEqual = 303,
    Less = 304,
    And = 400,
    /// The index of an element along an axis.
    Index = 501,
    /// X where the third operand is true, else B.
    Select = 601,
}

/// Reduction modes, by cuDNN's numbering.
#[derive(Clone, Copy)]
pub(super) enum Reduction {
    Sum = 0,
    Maximum = 3,
    /// Of the magnitudes.
    Greatest = 4,
}

/// Alignment of every tensor's address, in bytes.
pub(super) const ALIGNMENT: u64 = 16;

const CROSS_CORRELATION: i32 = 1;
/// Heuristic modes: those that use the shapes, then the fallback list.
const MODES: [i32; 2] = [3, 2];

/// Numerical and behavioural notes of engines, by cuDNN's numbering.
mod note {
    pub(super) const TENSOR_CORE: i32 = 0;
    pub(super) const NARROWED_INPUTS: i32 = 1;
    pub(super) const NARROWED_SUMS: i32 = 2;
    pub(super) const FFT: i32 = 3;
    pub(super) const NOT_DETERMINISTIC: i32 = 4;
    pub(super) const WINOGRAD: i32 = 5;
}

/// Index of a tensor of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Node(usize);

/// The place of a tensor's elements.
#[derive(Clone, Copy)]
enum TensorLocation {
    /// On the card, at the address with this unique id.
    Card(i64),
    /// A scalar on the host with this unique id, read when the plan is executed.
    Host(i64),
    /// Virtual: between two operations.
    Between,
}

/// A matrix product, with the effective counts of rows, columns and terms.
pub(super) struct MatrixProduct {
    pub(super) a: Node,
    pub(super) b: Node,
    pub(super) out: Node,
    pub(super) rows: Option<Node>,
    pub(super) columns: Option<Node>,
    pub(super) terms: Option<Node>,
}

/// Parameters of a convolution, one per spatial axis.
pub(super) struct Geometry<'a> {
    pub(super) before: &'a [i64],
    pub(super) after: &'a [i64],
    pub(super) strides: &'a [i64],
    pub(super) dilations: &'a [i64],
}

/// Requirements on an engine.
#[derive(Clone, Copy, Default)]
pub(super) struct Wanted {
    /// Products and sums in full f32: no TF32.
    pub(super) full_f32: bool,
    /// Maximum workspace of a plan in bytes.
    pub(super) workspace: usize,
}

/// A graph under construction.
pub(super) struct Graph {
    library: &'static Library,
    /// All descriptors except operations, each finalized.
    kept: Vec<Descriptor>,
    operations: Vec<Descriptor>,
    between: i64,
}

impl Graph {
    pub(super) fn new(library: &'static Library) -> Graph {
        Graph {
            library,
            kept: Vec::new(),
            operations: Vec::new(),
            // Unique ids must differ; those of tensors with an address are below.
            between: 100,
        }
    }

    fn keep(&mut self, kind: i32, attributes: &[(i32, Value<'_>)]) -> Outcome<usize> {
        self.kept.push(Descriptor::with(self.library, kind, attributes)?);
        Ok(self.kept.len() - 1)
    }

    fn tensor(
        &mut self,
        place: TensorLocation,
        numbers: DataType,
        dims: &[usize],
        strides: &[usize],
    ) -> Outcome<Node> {
        let wide = |values: &[usize]| -> Vec<i64> { values.iter().map(|value| *value as i64).collect() };
        let (dims, strides) = (wide(dims), wide(strides));
        let number = match place {
            TensorLocation::Card(number) | TensorLocation::Host(number) => number,
            TensorLocation::Between => {
                self.between += 1;
                self.between
            }
        };
        let (number, alignment) = ([number], [ALIGNMENT as i64]);
        let mut attributes = vec![
            (901, Value::DataType(numbers as i32)),
            (902, Value::Numbers(&dims)),
            (903, Value::Numbers(&strides)),
            (906, Value::Numbers(&number)),
            (900, Value::Numbers(&alignment)),
        ];
        match place {
            TensorLocation::Card(_) => {}
            TensorLocation::Host(_) => attributes.push((908, Value::Flag(true))),
            TensorLocation::Between => attributes.push((907, Value::Flag(true))),
        }
        self.keep(kind::TENSOR, &attributes).map(Node)
    }

    /// A tensor on the card, with its unique id. Strides are in elements.
    pub(super) fn on_card(
        &mut self,
        number: i64,
        numbers: DataType,
        dims: &[usize],
        strides: &[usize],
    ) -> Outcome<Node> {
        self.tensor(TensorLocation::Card(number), numbers, dims, strides)
    }

    /// A scalar on the host, with as many axes as the graph's other tensors.
    pub(super) fn scalar(&mut self, number: i64, numbers: DataType, axes: usize) -> Outcome<Node> {
        let ones = vec![1; axes];
        self.tensor(TensorLocation::Host(number), numbers, &ones, &ones)
    }

    /// A virtual tensor, the result of one operation and the input of others.
    pub(super) fn between(&mut self, numbers: DataType, dims: &[usize], strides: &[usize]) -> Outcome<Node> {
        self.tensor(TensorLocation::Between, numbers, dims, strides)
    }

    fn node(&self, node: Node) -> Outcome<&Descriptor> {
        self.kept
            .get(node.0)
            .ok_or_else(|| Failure::ours("a tensor of another graph"))
    }

    fn operation(&mut self, kind: i32, attributes: &[(i32, Attribute)]) -> Outcome<()> {
        let operation = Descriptor::new(self.library, kind)?;
        for (attribute, value) in attributes {
            match value {
                Attribute::Kept(kept) => {
                    operation.set(*attribute, Value::Descriptors(&[self.node(Node(*kept))?]))?;
                }
                Attribute::Float(number) => operation.set(*attribute, Value::Float(*number))?,
            }
        }
        operation.finalise()?;
        self.operations.push(operation);
        Ok(())
    }

    /// `out = a b`, summed in f32.
    pub(super) fn product(&mut self, product: &MatrixProduct) -> Outcome<()> {
        let form = self.keep(kind::PRODUCT, &[(1500, Value::DataType(DataType::F32 as i32))])?;
        let mut attributes = vec![
            (1520, Attribute::of(product.a)),
            (1521, Attribute::of(product.b)),
            (1522, Attribute::of(product.out)),
            (1523, Attribute::Kept(form)),
        ];
        let counted = [
            (1525, product.rows),
            (1526, product.columns),
            (1527, product.terms),
        ];
        attributes.extend(
            counted
                .iter()
                .filter_map(|(attribute, node)| node.map(|node| (*attribute, Attribute::of(node)))),
        );
        self.operation(kind::PRODUCT_OPERATION, &attributes)
    }

    /// `out = mode(x, b)`, computed in `numbers`.
    pub(super) fn pointwise(
        &mut self,
        mode: Pointwise,
        numbers: DataType,
        x: Node,
        b: Option<Node>,
        out: Node,
    ) -> Outcome<()> {
        self.pointwise_of(mode, numbers, None, [Some(x), b, None], out)
    }

    /// The index of each element of `x` along an axis, as i32.
    pub(super) fn index(&mut self, axis: i64, x: Node, out: Node) -> Outcome<()> {
        self.pointwise_of(
            Pointwise::Index,
            DataType::I32,
            Some(axis),
            [Some(x), None, None],
            out,
        )
    }

    /// `out = x` where the mask is true, else `other`.
    pub(super) fn select(&mut self, x: Node, other: Node, mask: Node, out: Node) -> Outcome<()> {
        let inputs = [Some(x), Some(other), Some(mask)];
        self.pointwise_of(Pointwise::Select, DataType::F32, None, inputs, out)
    }

    fn pointwise_of(
        &mut self,
        mode: Pointwise,
        numbers: DataType,
        axis: Option<i64>,
        [x, b, t]: [Option<Node>; 3],
        out: Node,
    ) -> Outcome<()> {
        let mut form = vec![
            (0, Value::PointwiseMode(mode as i32)),
            (1, Value::DataType(numbers as i32)),
        ];
        let axis = axis.map(|axis| [axis]);
        if let Some(axis) = &axis {
            form.push((9, Value::Numbers(axis)));
        }
        let form = self.keep(kind::POINTWISE, &form)?;
        let mut attributes = vec![
            (750, Attribute::Kept(form)),
            (753, Attribute::of(out)),
            (754, Attribute::Float(1.0)),
            (755, Attribute::Float(1.0)),
        ];
        let inputs = [(751, x), (752, b), (758, t)];
        attributes.extend(
            inputs
                .iter()
                .filter_map(|(attribute, node)| node.map(|node| (*attribute, Attribute::of(node)))),
        );
        self.operation(kind::POINTWISE_OPERATION, &attributes)
    }

    /// `out` is `x` reduced in f32 over the axes where it has dimension 1.
    pub(super) fn reduction(&mut self, reduction: Reduction, x: Node, out: Node) -> Outcome<()> {
        let form = [
            (1600, Value::ReductionOperator(reduction as i32)),
            (1601, Value::DataType(DataType::F32 as i32)),
        ];
        let form = self.keep(kind::REDUCTION, &form)?;
        let attributes = [
            (1612, Attribute::Kept(form)),
            (1610, Attribute::of(x)),
            (1611, Attribute::of(out)),
        ];
        self.operation(kind::REDUCTION_OPERATION, &attributes)
    }

    /// `out = x * filter`, as cross-correlation, accumulated in f32.
    pub(super) fn convolution(
        &mut self,
        geometry: &Geometry<'_>,
        x: Node,
        filter: Node,
        out: Node,
    ) -> Outcome<()> {
        let axes = [geometry.strides.len() as i64];
        let form = [
            (100, Value::DataType(DataType::F32 as i32)),
            (101, Value::ConvolutionMode(CROSS_CORRELATION)),
            (106, Value::Numbers(&axes)),
            (105, Value::Numbers(geometry.before)),
            (104, Value::Numbers(geometry.after)),
            (103, Value::Numbers(geometry.strides)),
            (102, Value::Numbers(geometry.dilations)),
        ];
        let form = self.keep(kind::CONVOLUTION, &form)?;
        let attributes = [
            (702, Attribute::Kept(form)),
            (704, Attribute::of(x)),
            (703, Attribute::of(filter)),
            (705, Attribute::of(out)),
            (700, Attribute::Float(1.0)),
            (701, Attribute::Float(0.0)),
        ];
        self.operation(kind::CONVOLUTION_FORWARD, &attributes)
    }

    /// The first plan, in the order of the heuristics, that meets the requirements and compiles.
    ///
    /// # Errors
    /// The failure of the last candidate.
    pub(super) fn plan(self, target: &CompileTarget, wanted: Wanted) -> Outcome<Plan> {
        let Graph {
            library,
            mut kept,
            operations,
            ..
        } = self;
        let listed: Vec<&Descriptor> = operations.iter().collect();
        let mut attributes = vec![(801, Value::Descriptors(&listed))];
        attributes.extend(target.of_graph());
        let graph = Descriptor::with(library, kind::GRAPH, &attributes)?;
        let mut last = Failure::refused("no engine takes the graph");
        for mode in MODES {
            let configurations = match configurations(library, &graph, target, mode) {
                Ok(configurations) => configurations,
                Err(failure) if failure.is_of_a_plan() => {
                    last = failure;
                    continue;
                }
                Err(failure) => return Err(failure),
            };
            for configuration in configurations {
                match suits(library, &configuration, wanted)
                    .and_then(|()| Plan::of(library, target, configuration, wanted.workspace))
                {
                    Ok(mut plan) => {
                        // Drop order: a plan before its graph, and that before its parts.
                        kept.extend(operations);
                        kept.push(graph);
                        plan.keep(kept);
                        return Ok(plan);
                    }
                    Err(failure) if failure.is_of_a_plan() => last = failure,
                    Err(failure) => return Err(failure),
                }
            }
        }
        Err(last)
    }
}

/// An attribute of an operation.
enum Attribute {
    /// Index of a descriptor that the graph owns.
    Kept(usize),
    Float(f32),
}

impl Attribute {
    fn of(node: Node) -> Attribute {
        Attribute::Kept(node.0)
    }
}

/// The engine configurations that a heuristic mode proposes, best first.
fn configurations(
    library: &'static Library,
    graph: &Descriptor,
    target: &CompileTarget,
    mode: i32,
) -> Outcome<Vec<Descriptor>> {
    const RESULTS: i32 = 202;
    let mut attributes = vec![
        (201, Value::Descriptors(std::slice::from_ref(&graph))),
        (200, Value::HeuristicMode(mode)),
    ];
    let properties = target.properties();
    attributes.extend(
        properties
            .iter()
            .map(|properties| (204, Value::Descriptors(std::slice::from_ref(properties)))),
    );
    let heuristics = Descriptor::with(library, kind::HEURISTICS, &attributes)?;
    let count = heuristics.count(RESULTS)?;
    let mut configurations = (0..count)
        .map(|_| Descriptor::new(library, kind::CONFIGURATION))
        .collect::<Outcome<Vec<_>>>()?;
    if count > 0 {
        heuristics.fill(RESULTS, &mut configurations)?;
    }
    Ok(configurations)
}

/// Checks that a configuration's engine is deterministic, and as exact as required.
fn suits(library: &'static Library, configuration: &Descriptor, wanted: Wanted) -> Outcome<()> {
    let mut engine = vec![Descriptor::new(library, kind::ENGINE)?];
    configuration.fill(300, &mut engine)?;
    let Some(engine) = engine.first() else {
        return Err(Failure::refused("a configuration without an engine"));
    };
    let notes = engine.notes(1303)?;
    let has = |unwanted: &[i32]| notes.iter().any(|note| unwanted.contains(note));
    if has(&[note::NOT_DETERMINISTIC, note::NARROWED_SUMS]) {
        return Err(Failure::refused(
            "its engines are not exact enough, or not the same each time",
        ));
    }
    let narrow = [
        note::TENSOR_CORE,
        note::NARROWED_INPUTS,
        note::FFT,
        note::WINOGRAD,
    ];
    if wanted.full_f32 && has(&narrow) {
        return Err(Failure::refused(
            "its engines compute with fewer bits than f32 has",
        ));
    }
    Ok(())
}
