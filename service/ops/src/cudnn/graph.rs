//! A graph of operations as cuDNN takes it, from its tensors to a plan that runs it.

use super::descriptor::{Descriptor, Value, kind};
use super::plan::{Plan, Target};
use super::{Failure, Library, Outcome};

/// Types of numbers, by cuDNN's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Numbers {
    F32 = 0,
    F16 = 2,
    I32 = 4,
    Bf16 = 9,
    Flag = 11,
}

impl Numbers {
    /// Those of a tensor, if cuDNN computes with them here.
    pub(super) fn of(dtype: candle_core::DType) -> Option<Numbers> {
        match dtype {
            candle_core::DType::F32 => Some(Numbers::F32),
            candle_core::DType::F16 => Some(Numbers::F16),
            candle_core::DType::BF16 => Some(Numbers::Bf16),
            _ => None,
        }
    }
}

/// Pointwise operations, by cuDNN's numbers.
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
    /// The place of a number on an axis.
    Index = 501,
    /// X where the third is true, else B.
    Select = 601,
}

/// Reductions, by cuDNN's numbers.
#[derive(Clone, Copy)]
pub(super) enum Reduction {
    Sum = 0,
    Maximum = 3,
}

/// Alignment of every address, in bytes.
pub(super) const ALIGNMENT: u64 = 16;

const CROSS_CORRELATION: i32 = 1;
/// Heuristics: those that know shapes, then a list of what runs at all.
const MODES: [i32; 2] = [3, 2];

/// Notes of engines, by cuDNN's numbers.
mod note {
    pub(super) const TENSOR_CORE: i32 = 0;
    pub(super) const NARROWED_INPUTS: i32 = 1;
    pub(super) const NARROWED_SUMS: i32 = 2;
    pub(super) const FFT: i32 = 3;
    pub(super) const NOT_DETERMINISTIC: i32 = 4;
    pub(super) const WINOGRAD: i32 = 5;
}

/// A tensor of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Node(usize);

/// Where a tensor's numbers are.
#[derive(Clone, Copy)]
enum Place {
    /// At an address of the card, by this number.
    Card(i64),
    /// At an address of the host, one number, read when the plan is run.
    Host(i64),
    /// Nowhere: between two operations.
    Between,
}

/// The sides of two operands, and what they are multiplied to, with how many rows, columns and terms count of them.
pub(super) struct Product {
    pub(super) a: Node,
    pub(super) b: Node,
    pub(super) out: Node,
    pub(super) rows: Option<Node>,
    pub(super) columns: Option<Node>,
    pub(super) terms: Option<Node>,
}

/// A convolution's numbers, one for each spatial axis.
pub(super) struct Geometry<'a> {
    pub(super) before: &'a [i64],
    pub(super) after: &'a [i64],
    pub(super) strides: &'a [i64],
    pub(super) dilations: &'a [i64],
}

/// What is asked of an engine.
#[derive(Clone, Copy, Default)]
pub(super) struct Wanted {
    /// Sums and products in full f32: no TF32.
    pub(super) full_f32: bool,
    /// Bytes that a plan may take beside its operands.
    pub(super) workspace: usize,
}

/// A graph that is being made.
pub(super) struct Graph {
    library: &'static Library,
    /// All descriptors but operations, each of which is finalised.
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
            // Numbers of tensors must differ; those that have addresses are below.
            between: 100,
        }
    }

    fn keep(&mut self, kind: i32, attributes: &[(i32, Value<'_>)]) -> Outcome<usize> {
        self.kept.push(Descriptor::with(self.library, kind, attributes)?);
        Ok(self.kept.len() - 1)
    }

    fn tensor(&mut self, place: Place, numbers: Numbers, dims: &[usize], strides: &[usize]) -> Outcome<Node> {
        let wide = |values: &[usize]| -> Vec<i64> { values.iter().map(|value| *value as i64).collect() };
        let (dims, strides) = (wide(dims), wide(strides));
        let number = match place {
            Place::Card(number) | Place::Host(number) => number,
            Place::Between => {
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
            Place::Card(_) => {}
            Place::Host(_) => attributes.push((908, Value::Flag(true))),
            Place::Between => attributes.push((907, Value::Flag(true))),
        }
        self.keep(kind::TENSOR, &attributes).map(Node)
    }

    /// A tensor on the card, which runs name by its number. Strides are in numbers.
    pub(super) fn on_card(
        &mut self,
        number: i64,
        numbers: Numbers,
        dims: &[usize],
        strides: &[usize],
    ) -> Outcome<Node> {
        self.tensor(Place::Card(number), numbers, dims, strides)
    }

    /// A number of the host, of as many axes as the graph's other tensors.
    pub(super) fn scalar(&mut self, number: i64, numbers: Numbers, axes: usize) -> Outcome<Node> {
        let ones = vec![1; axes];
        self.tensor(Place::Host(number), numbers, &ones, &ones)
    }

    /// What one operation gives to others.
    pub(super) fn between(&mut self, numbers: Numbers, dims: &[usize], strides: &[usize]) -> Outcome<Node> {
        self.tensor(Place::Between, numbers, dims, strides)
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
    pub(super) fn product(&mut self, product: &Product) -> Outcome<()> {
        let form = self.keep(kind::PRODUCT, &[(1500, Value::DataType(Numbers::F32 as i32))])?;
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
        numbers: Numbers,
        x: Node,
        b: Option<Node>,
        out: Node,
    ) -> Outcome<()> {
        self.pointwise_of(mode, numbers, None, [Some(x), b, None], out)
    }

    /// Where on an axis each number of `x` is, as i32.
    pub(super) fn index(&mut self, axis: i64, x: Node, out: Node) -> Outcome<()> {
        self.pointwise_of(
            Pointwise::Index,
            Numbers::I32,
            Some(axis),
            [Some(x), None, None],
            out,
        )
    }

    /// `out = x` where the mask is true, else `other`.
    pub(super) fn select(&mut self, x: Node, other: Node, mask: Node, out: Node) -> Outcome<()> {
        let inputs = [Some(x), Some(other), Some(mask)];
        self.pointwise_of(Pointwise::Select, Numbers::F32, None, inputs, out)
    }

    fn pointwise_of(
        &mut self,
        mode: Pointwise,
        numbers: Numbers,
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

    /// `out` is `x` reduced over the axes along which it is 1, in f32.
    pub(super) fn reduction(&mut self, reduction: Reduction, x: Node, out: Node) -> Outcome<()> {
        let form = [
            (1600, Value::ReductionOperator(reduction as i32)),
            (1601, Value::DataType(Numbers::F32 as i32)),
        ];
        let form = self.keep(kind::REDUCTION, &form)?;
        let attributes = [
            (1612, Attribute::Kept(form)),
            (1610, Attribute::of(x)),
            (1611, Attribute::of(out)),
        ];
        self.operation(kind::REDUCTION_OPERATION, &attributes)
    }

    /// `out = x * filter`, as machine learning has convolutions: no filter is turned. Sums are in f32.
    pub(super) fn convolution(
        &mut self,
        geometry: &Geometry<'_>,
        x: Node,
        filter: Node,
        out: Node,
    ) -> Outcome<()> {
        let axes = [geometry.strides.len() as i64];
        let form = [
            (100, Value::DataType(Numbers::F32 as i32)),
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

    /// The first plan of the heuristics' that is as it is wanted and can be made.
    ///
    /// # Errors
    /// Why there is none: of the last that was tried.
    pub(super) fn plan(self, target: &Target, wanted: Wanted) -> Outcome<Plan> {
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
                        // A plan is destroyed before its graph, and that before what it is made of.
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
    /// One of the descriptors that the graph keeps.
    Kept(usize),
    Float(f32),
}

impl Attribute {
    fn of(node: Node) -> Attribute {
        Attribute::Kept(node.0)
    }
}

/// What the heuristics of a mode advise, best first.
fn configurations(
    library: &'static Library,
    graph: &Descriptor,
    target: &Target,
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

/// Whether a configuration's engine gives the same numbers each time, and as exact as they are wanted.
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
