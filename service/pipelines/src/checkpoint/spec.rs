//! Where the tensors of a model are in a checkpoint.

/// A range of rows of a tensor of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) first: usize,
    pub(crate) count: usize,
}

/// A tensor of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorSpec {
    /// Name in diffusers.
    pub(crate) name: String,
    /// Shape, row-major.
    pub(crate) shape: Vec<usize>,
    /// The tensor of the checkpoint that contains it.
    pub(crate) tensor: String,
    /// The tensor's row ranges in the file, concatenated.
    pub(crate) rows: Vec<Rows>,
}

impl TensorSpec {
    /// A tensor that is a whole tensor of the checkpoint, with the same name.
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

/// The tensors of a transformer, as they are listed.
#[derive(Debug, Default)]
pub(crate) struct Layout(pub(crate) Vec<TensorSpec>);

impl Layout {
    /// A weight `[outputs, inputs]` and a bias `[outputs]`, which in a single file are rows of `theirs` from `first` on.
    pub(crate) fn linear(&mut self, name: &str, [outputs, inputs]: [usize; 2], theirs: &str, first: usize) {
        for (kind, shape) in [("weight", vec![outputs, inputs]), ("bias", vec![outputs])] {
            self.rows(
                &format!("{name}.{kind}"),
                shape,
                &format!("{theirs}.{kind}"),
                first,
            );
        }
    }

    /// A weight `[outputs, inputs]` of a layer without a bias, as [`Layout::linear`].
    pub(crate) fn weight(&mut self, name: &str, [outputs, inputs]: [usize; 2], theirs: &str, first: usize) {
        let theirs = format!("{theirs}.weight");
        self.rows(&format!("{name}.weight"), vec![outputs, inputs], &theirs, first);
    }

    /// A tensor, which in a single file is rows of `theirs` from `first` on.
    pub(crate) fn rows(&mut self, name: &str, shape: Vec<usize>, theirs: &str, first: usize) {
        let count = shape.first().copied().unwrap_or_default();
        self.0.push(TensorSpec {
            name: name.to_owned(),
            shape,
            tensor: theirs.to_owned(),
            rows: vec![Rows { first, count }],
        });
    }

    /// A tensor of the same name in a single file.
    pub(crate) fn same(&mut self, name: &str, shape: &[usize]) {
        self.rows(name, shape.to_vec(), name, 0);
    }
}
