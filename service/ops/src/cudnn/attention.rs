//! Attention as a graph: two matrix products with a softmax between them, which cuDNN recognizes and runs as one
//! kernel that never materializes the scores (Dao, "FlashAttention-2", 2023).

use super::graph::{DataType, Graph, MatrixProduct, Node, Pointwise, Reduction};
use super::{Library, Outcome, PlanShape, Recorded};
use crate::planned::{AttentionShape, MaskShape};

/// Unique ids of the tensors of a graph, used in variant packs.
pub(super) mod number {
    pub(crate) const Q: i64 = 1;
    pub(crate) const K: i64 = 2;
    pub(crate) const V: i64 = 3;
    pub(crate) const OUT: i64 = 4;
    pub(crate) const SCALE: i64 = 5;
    pub(crate) const BIAS: i64 = 6;
    pub(crate) const LOG_SUMS: i64 = 7;
    pub(crate) const QUERIES: i64 = 8;
    pub(crate) const KEYS: i64 = 9;
    pub(crate) const HIDDEN: i64 = 10;
    pub(crate) const AFTER: i64 = 12;
    pub(crate) const BEFORE: i64 = 13;
    /// The first of those of [`super::Fp8Scales`], which follow each other.
    pub(crate) const FP8_SCALES: i64 = 20;
}

/// Scalars on the card of an attention in e4m3, f32, in this order, [`FP8_SCALE_BYTES`] from each other. A scale multiplies what is to
/// become codes, a step multiplies codes.
#[derive(Clone, Copy)]
pub(crate) enum Fp8Scales {
    QueryStep,
    KeyStep,
    ValueStep,
    WeightScale,
    WeightStep,
    OutScale,
    /// Greatest magnitudes, which cuDNN's kernel writes and nobody reads.
    GreatestWeight,
    GreatestOut,
}

impl Fp8Scales {
    pub(crate) const ALL: [Fp8Scales; 8] = [
        Fp8Scales::QueryStep,
        Fp8Scales::KeyStep,
        Fp8Scales::ValueStep,
        Fp8Scales::WeightScale,
        Fp8Scales::WeightStep,
        Fp8Scales::OutScale,
        Fp8Scales::GreatestWeight,
        Fp8Scales::GreatestOut,
    ];

    fn number(self) -> i64 {
        number::FP8_SCALES + self as i64
    }

    /// The addresses by their unique ids, of scalars that begin at an address.
    pub(super) fn add_to(start: u64, addresses: &mut Vec<(i64, u64)>) {
        addresses.extend(Fp8Scales::ALL.map(|scale| {
            let at = start + scale as u64 * FP8_SCALE_BYTES;
            (scale.number(), at)
        }));
    }
}

/// Distance of the scalars of an attention in e4m3: the alignment of tensors.
pub(crate) const FP8_SCALE_BYTES: u64 = 16;

/// Addresses of one attention's operands on the card, aligned to 16 bytes. `out` overlaps none of the others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionAt {
    pub(crate) q: u64,
    pub(crate) k: u64,
    pub(crate) v: u64,
    pub(crate) out: u64,
    /// Set with [`MaskShape::Bias`].
    pub(crate) bias: Option<u64>,
    /// Set with [`MaskShape::Lengths`]: `[batch]` i32 of queries, and of keys.
    pub(crate) lengths: Option<(u64, u64)>,
    /// Set with [`AttentionShape::log_sums`].
    pub(crate) log_sums: Option<u64>,
    /// Set with [`AttentionShape::in_fp8`]: where [`Fp8Scales`] begin. The others are addresses of codes then.
    pub(crate) fp8_scales: Option<u64>,
    /// Scale of the scores.
    pub(crate) scale: f32,
}

/// Scalars of an attention, read from here while a run is enqueued.
pub(super) struct Scalars {
    scale: f32,
    hidden: f32,
    before_and_itself: i32,
    beyond: i32,
}

impl Scalars {
    pub(super) fn of(shape: &AttentionShape, scale: f32) -> Scalars {
        let (before, after) = shape.reach();
        Scalars {
            scale,
            hidden: f32::NEG_INFINITY,
            before_and_itself: before.map_or(0, |before| before as i32 + 1),
            beyond: after.map_or(0, |after| after as i32),
        }
    }

    /// Adds the addresses of the scalars that the graph of this shape has.
    pub(super) fn add_to(&self, addresses: &mut Vec<(i64, u64)>, shape: &AttentionShape) {
        let (before, after) = shape.reach();
        addresses.push((number::SCALE, (&raw const self.scale) as u64));
        if before.is_some() || after.is_some() || shape.mask == MaskShape::Lengths {
            addresses.push((number::HIDDEN, (&raw const self.hidden) as u64));
        }
        if before.is_some() {
            addresses.push((number::BEFORE, (&raw const self.before_and_itself) as u64));
        }
        if after.is_some_and(|after| after > 0) {
            addresses.push((number::AFTER, (&raw const self.beyond) as u64));
        }
    }
}

impl PlanShape for AttentionShape {
    const NAME: &'static str = "attention";

    /// The dtype of both products, if no dimension is zero.
    fn numbers(&self) -> Option<DataType> {
        let sides = [
            self.batch,
            self.heads,
            self.heads_kv,
            self.queries,
            self.keys,
            self.width,
        ];
        let fits = !sides.contains(&0) && self.heads.is_multiple_of(self.heads_kv);
        let numbers = DataType::of(self.dtype).filter(|numbers| fits && *numbers != DataType::F32)?;
        Some(if self.in_fp8 { DataType::E4m3 } else { numbers })
    }

    fn graph(&self, library: &'static Library, numbers: DataType) -> Outcome<Graph> {
        let mut made = Scores::new(self, library, numbers)?;
        let scores = made.scores()?;
        let scores = made.masked(scores)?;
        made.weighted(scores)?;
        Ok(made.graph)
    }

    fn recorded(&self, everywhere: u64) -> Recorded {
        let mut numbers = vec![number::Q, number::K, number::V, number::OUT];
        match self.mask {
            MaskShape::Bias { .. } => numbers.push(number::BIAS),
            MaskShape::Lengths => numbers.extend([number::QUERIES, number::KEYS]),
            MaskShape::None | MaskShape::Causal | MaskShape::Window { .. } => {}
        }
        if self.log_sums {
            numbers.push(number::LOG_SUMS);
        }
        if self.in_fp8 {
            numbers.extend(Fp8Scales::ALL.map(Fp8Scales::number));
        }
        let mut at = numbers.into_iter().map(|number| (number, everywhere)).collect();
        let scalars = Box::new(Scalars::of(self, 1.0));
        scalars.add_to(&mut at, self);
        Recorded {
            at,
            scalars: Some(scalars),
        }
    }
}

impl AttentionShape {
    /// Strides of an operand of this attention: in codes, if those are what it reads.
    fn strides_of(&self, operand: [usize; 3]) -> [usize; 3] {
        let [batch, token, head] = operand;
        match self.in_fp8 {
            // Codes lie in the rows of numbers, head after head.
            true => {
                let codes = self.dtype.size_in_bytes();
                [batch * codes, token * codes, head]
            }
            false => operand,
        }
    }

    /// How far a query attends before and after itself; `None` where unbounded.
    pub(super) fn reach(&self) -> (Option<usize>, Option<usize>) {
        match self.mask {
            MaskShape::Causal => (None, Some(0)),
            MaskShape::Window { before, after } => (
                Some(before).filter(|before| before + 1 < self.queries),
                Some(after).filter(|after| after + 1 < self.keys),
            ),
            MaskShape::None | MaskShape::Bias { .. } | MaskShape::Lengths => (None, None),
        }
    }
}

/// A graph under construction, whose tensors have the shape of the scores, or of one element per row of them.
struct Scores<'a> {
    shape: &'a AttentionShape,
    numbers: DataType,
    graph: Graph,
    lengths: Option<(Node, Node)>,
}

impl<'a> Scores<'a> {
    fn new(shape: &'a AttentionShape, library: &'static Library, numbers: DataType) -> Outcome<Scores<'a>> {
        let mut graph = Graph::new(library);
        let lengths = match shape.mask {
            MaskShape::Lengths => {
                let mut of =
                    |number| graph.on_card(number, DataType::I32, &[shape.batch, 1, 1, 1], &[1, 1, 1, 1]);
                Some((of(number::QUERIES)?, of(number::KEYS)?))
            }
            _ => None,
        };
        Ok(Scores {
            shape,
            numbers,
            graph,
            lengths,
        })
    }

    /// A tensor of the shape of the scores.
    fn all(&mut self, numbers: DataType) -> Outcome<Node> {
        let AttentionShape {
            batch,
            heads,
            queries,
            keys,
            ..
        } = *self.shape;
        let strides = [heads * queries * keys, queries * keys, keys, 1];
        self.graph
            .between(numbers, &[batch, heads, queries, keys], &strides)
    }

    /// Dimensions and strides of a tensor of one element per query.
    fn of_rows(&self) -> ([usize; 4], [usize; 4]) {
        let AttentionShape {
            batch,
            heads,
            queries,
            ..
        } = *self.shape;
        ([batch, heads, queries, 1], [heads * queries, queries, 1, 1])
    }

    /// A tensor of one element per query.
    fn row(&mut self) -> Outcome<Node> {
        let (dims, strides) = self.of_rows();
        self.graph.between(DataType::F32, &dims, &strides)
    }

    /// The logarithm of the sum of each row: cuDNN recognizes the pattern by it, whether it is read or not.
    fn log_sums(&mut self) -> Outcome<Node> {
        let (dims, strides) = self.of_rows();
        match self.shape.log_sums {
            true => self
                .graph
                .on_card(number::LOG_SUMS, DataType::F32, &dims, &strides),
            false => self.graph.between(DataType::F32, &dims, &strides),
        }
    }

    fn scalar(&mut self, number: i64, numbers: DataType) -> Outcome<Node> {
        self.graph.scalar(number, numbers, 4)
    }

    /// The scaled products of queries and keys.
    fn scores(&mut self) -> Outcome<Node> {
        let (shape, numbers) = (self.shape, self.numbers);
        let [batch, token, head] = shape.strides_of(shape.q);
        let dims = [shape.batch, shape.heads, shape.queries, shape.width];
        let q = self
            .graph
            .on_card(number::Q, numbers, &dims, &[batch, head, token, 1])?;
        let [batch, token, head] = shape.strides_of(shape.k);
        // The keys, transposed.
        let dims = [shape.batch, shape.heads_kv, shape.width, shape.keys];
        let k = self
            .graph
            .on_card(number::K, numbers, &dims, &[batch, head, 1, token])?;
        let products = self.all(DataType::F32)?;
        self.graph.product(&MatrixProduct {
            a: q,
            b: k,
            out: products,
            rows: self.lengths.map(|(queries, _)| queries),
            columns: self.lengths.map(|(_, keys)| keys),
            terms: None,
        })?;
        let scale = self.scalar(number::SCALE, DataType::F32)?;
        let scores = self.all(DataType::F32)?;
        self.graph
            .pointwise(Pointwise::Multiply, DataType::F32, products, Some(scale), scores)?;
        if !self.shape.in_fp8 {
            return Ok(scores);
        }
        let scores = self.times(scores, Fp8Scales::QueryStep)?;
        self.times(scores, Fp8Scales::KeyStep)
    }

    /// A scalar of an attention in e4m3.
    fn fp8_scale(&mut self, scale: Fp8Scales) -> Outcome<Node> {
        self.graph
            .on_card(scale.number(), DataType::F32, &[1; 4], &[1; 4])
    }

    /// A tensor of the shape of the scores, times a scalar.
    fn times(&mut self, x: Node, scale: Fp8Scales) -> Outcome<Node> {
        let scale = self.fp8_scale(scale)?;
        let out = self.all(DataType::F32)?;
        self.graph
            .pointwise(Pointwise::Multiply, DataType::F32, x, Some(scale), out)?;
        Ok(out)
    }

    /// Minus infinity where a query does not attend to a key, plus the bias.
    fn masked(&mut self, scores: Node) -> Outcome<Node> {
        let mut scores = scores;
        if let MaskShape::Bias { dims, strides } = &self.shape.mask {
            let bias = self.graph.on_card(number::BIAS, self.numbers, dims, strides)?;
            let sum = self.all(DataType::F32)?;
            self.graph
                .pointwise(Pointwise::Add, DataType::F32, scores, Some(bias), sum)?;
            scores = sum;
        }
        let (before, after) = self.shape.reach();
        if after.is_some() {
            // row + after >= column
            let row = self.place(2, scores, after.filter(|after| *after > 0).map(|_| number::AFTER))?;
            let column = self.place(3, scores, None)?;
            scores = self.kept_where(Pointwise::GreaterOrEqual, row, column, scores)?;
        }
        if before.is_some() {
            // column + (before + 1) > row
            let row = self.place(2, scores, None)?;
            let column = self.place(3, scores, Some(number::BEFORE))?;
            scores = self.kept_where(Pointwise::Greater, column, row, scores)?;
        }
        if let Some((queries, keys)) = self.lengths {
            let row = self.place(2, scores, None)?;
            let column = self.place(3, scores, None)?;
            let [has_row, has_column, has_both] = [
                self.all(DataType::Flag)?,
                self.all(DataType::Flag)?,
                self.all(DataType::Flag)?,
            ];
            let graph = &mut self.graph;
            graph.pointwise(Pointwise::Less, DataType::Flag, row, Some(queries), has_row)?;
            graph.pointwise(Pointwise::Less, DataType::Flag, column, Some(keys), has_column)?;
            graph.pointwise(
                Pointwise::And,
                DataType::Flag,
                has_row,
                Some(has_column),
                has_both,
            )?;
            scores = self.selected(scores, has_both)?;
        }
        Ok(scores)
    }

    /// The index of each score along an axis, plus an optional scalar.
    fn place(&mut self, axis: i64, scores: Node, more: Option<i64>) -> Outcome<Node> {
        let place = self.all(DataType::I32)?;
        self.graph.index(axis, scores, place)?;
        let Some(number) = more else {
            return Ok(place);
        };
        let more = self.scalar(number, DataType::I32)?;
        let sum = self.all(DataType::I32)?;
        self.graph
            .pointwise(Pointwise::Add, DataType::I32, place, Some(more), sum)?;
        Ok(sum)
    }

    fn kept_where(&mut self, mode: Pointwise, a: Node, b: Node, scores: Node) -> Outcome<Node> {
        let mask = self.all(DataType::Flag)?;
        self.graph.pointwise(mode, DataType::Flag, a, Some(b), mask)?;
        self.selected(scores, mask)
    }

    fn selected(&mut self, scores: Node, mask: Node) -> Outcome<Node> {
        let hidden = self.scalar(number::HIDDEN, DataType::F32)?;
        let selected = self.all(DataType::F32)?;
        self.graph.select(scores, hidden, mask, selected)?;
        Ok(selected)
    }

    /// The softmax of the scores, and its product with the values.
    fn weighted(&mut self, scores: Node) -> Outcome<()> {
        let (shape, numbers) = (self.shape, self.numbers);
        let highest = self.row()?;
        let less = self.all(DataType::F32)?;
        let exponentials = self.all(DataType::F32)?;
        let sums = self.row()?;
        let logarithms = self.row()?;
        let log_sums = self.log_sums()?;
        let weights = self.all(if shape.in_fp8 { DataType::F32 } else { numbers })?;
        let graph = &mut self.graph;
        graph.reduction(Reduction::Maximum, scores, highest)?;
        graph.pointwise(Pointwise::Subtract, DataType::F32, scores, Some(highest), less)?;
        graph.pointwise(Pointwise::Exp, DataType::F32, less, None, exponentials)?;
        graph.reduction(Reduction::Sum, exponentials, sums)?;
        graph.pointwise(Pointwise::Log, DataType::F32, sums, None, logarithms)?;
        graph.pointwise(Pointwise::Add, DataType::F32, highest, Some(logarithms), log_sums)?;
        graph.pointwise(
            Pointwise::Divide,
            DataType::F32,
            exponentials,
            Some(sums),
            weights,
        )?;
        let weights = match shape.in_fp8 {
            true => self.codes_of(weights)?,
            false => weights,
        };
        let graph = &mut self.graph;
        let [batch, token, head] = shape.strides_of(shape.v);
        let dims = [shape.batch, shape.heads_kv, shape.keys, shape.width];
        let v = graph.on_card(number::V, numbers, &dims, &[batch, head, token, 1])?;
        let [batch, token, head] = shape.strides_of(shape.out);
        let dims = [shape.batch, shape.heads, shape.queries, shape.width];
        let strides = [batch, head, token, 1];
        let out = graph.on_card(number::OUT, numbers, &dims, &strides)?;
        let product = match shape.in_fp8 {
            true => graph.between(DataType::F32, &dims, &strides)?,
            false => out,
        };
        graph.product(&MatrixProduct {
            a: weights,
            b: v,
            out: product,
            rows: self.lengths.map(|(queries, _)| queries),
            columns: None,
            terms: self.lengths.map(|(_, keys)| keys),
        })?;
        match shape.in_fp8 {
            true => self.codes_of_sums(product, (&dims, &strides), out),
            false => Ok(()),
        }
    }

    /// The weights in e4m3. Their greatest is asked for because cuDNN recognizes the pattern by it.
    fn codes_of(&mut self, weights: Node) -> Outcome<Node> {
        let greatest = self.fp8_scale(Fp8Scales::GreatestWeight)?;
        let scale = self.fp8_scale(Fp8Scales::WeightScale)?;
        let codes = self.all(DataType::E4m3)?;
        self.graph.reduction(Reduction::Greatest, weights, greatest)?;
        self.graph
            .pointwise(Pointwise::Multiply, DataType::F32, weights, Some(scale), codes)?;
        Ok(codes)
    }

    /// Sums of codes of weights and values, as codes to `out`.
    fn codes_of_sums(
        &mut self,
        sums: Node,
        (dims, strides): (&[usize; 4], &[usize; 4]),
        out: Node,
    ) -> Outcome<()> {
        let mut sums = sums;
        for step in [Fp8Scales::WeightStep, Fp8Scales::ValueStep] {
            let step = self.fp8_scale(step)?;
            let product = self.graph.between(DataType::F32, dims, strides)?;
            self.graph
                .pointwise(Pointwise::Multiply, DataType::F32, sums, Some(step), product)?;
            sums = product;
        }
        let scale = self.fp8_scale(Fp8Scales::OutScale)?;
        let greatest = self.fp8_scale(Fp8Scales::GreatestOut)?;
        self.graph
            .pointwise(Pointwise::Multiply, DataType::F32, sums, Some(scale), out)?;
        self.graph.reduction(Reduction::Greatest, sums, greatest)
    }
}
