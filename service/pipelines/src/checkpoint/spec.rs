//! Where a tensor that the mathematics asks for lies among those of a checkpoint.

/// Rows of a tensor of a single file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    /// The first row.
    pub(crate) first: usize,
    /// How many.
    pub(crate) count: usize,
}

/// A tensor that the mathematics asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorSpec {
    /// In the words of diffusers.
    pub(crate) name: String,
    /// Row-major.
    pub(crate) shape: Vec<usize>,
    /// The tensor of the checkpoint that it lies in.
    pub(crate) tensor: String,
    /// Where it lies there, part behind part.
    pub(crate) rows: Vec<Rows>,
}

impl TensorSpec {
    /// A tensor that is the whole of one of the same name.
    pub(crate) fn whole(name: String, shape: Vec<usize>) -> TensorSpec {
        let count = shape.first().copied().unwrap_or_default();
        TensorSpec {
            tensor: name.clone(),
            name,
            shape,
            rows: vec![Rows { first: 0, count }],
        }
    }
}
