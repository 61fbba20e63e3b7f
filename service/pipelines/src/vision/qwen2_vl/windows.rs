//! Windows of a picture, within which most blocks attend. Those at the right and lower borders are smaller, not padded.

use super::{CELL, Grid, MERGED};

/// Windows of equal size, one after the other in the order of windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Number of the first patch.
    pub(super) first: usize,
    /// Number of windows.
    pub(super) windows: usize,
    /// Patches of each.
    pub(super) patches: usize,
}

impl Run {
    /// The whole picture as one window.
    pub(super) fn whole(grid: Grid) -> Run {
        Run {
            first: 0,
            windows: 1,
            patches: grid.patches(),
        }
    }
}

/// The parts of a side of cells, each `window` long but the last.
fn parts(side: usize, window: usize) -> impl Iterator<Item = (usize, usize)> + Clone {
    (0..side)
        .step_by(window.max(1))
        .map(move |first| (first, window.min(side - first)))
}

/// The windows of a picture, row by row, in runs of equal size. `window` is their side in cells.
pub(super) fn runs(grid: Grid, window: usize) -> Vec<Run> {
    let [rows, columns] = grid.cells();
    let mut runs: Vec<Run> = Vec::new();
    let mut first = 0;
    for (_, height) in parts(rows, window) {
        for (_, width) in parts(columns, window) {
            let patches = CELL * height * width;
            match runs.last_mut().filter(|run| run.patches == patches) {
                Some(run) => run.windows += 1,
                None => runs.push(Run {
                    first,
                    windows: 1,
                    patches,
                }),
            }
            first += patches;
        }
    }
    runs
}

/// Row and column of each cell in the order of windows: window by window, row by row within each.
pub(super) fn cells_in_order(grid: Grid, window: usize) -> Vec<[usize; 2]> {
    let [rows, columns] = grid.cells();
    let mut cells = Vec::with_capacity(grid.tokens());
    for (top, height) in parts(rows, window) {
        for (left, width) in parts(columns, window) {
            let of_window =
                (top..top + height).flat_map(|row| (left..left + width).map(move |column| [row, column]));
            cells.extend(of_window);
        }
    }
    cells
}

/// Row and column of each patch of these cells.
pub(super) fn patches_of(cells: &[[usize; 2]]) -> Vec<[u32; 2]> {
    let of_cell = |[row, column]: &[usize; 2]| {
        let (row, column) = (MERGED * row, MERGED * column);
        (0..CELL).map(move |i| [(row + i / MERGED) as u32, (column + i % MERGED) as u32])
    };
    cells.iter().flat_map(of_cell).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_at_the_borders_are_smaller() {
        let run = |first, windows, patches| Run {
            first,
            windows,
            patches,
        };
        // A picture of 392x392 pixels: sixteen windows of 64, 32 and 16 patches.
        let grid = Grid {
            rows: 28,
            columns: 28,
        };
        let found = runs(grid, 4);
        let expected = [
            run(0, 3, 64),
            run(192, 1, 32),
            run(224, 3, 64),
            run(416, 1, 32),
            run(448, 3, 64),
            // The window at the right of the third row and those of the fourth are of equal size.
            run(640, 4, 32),
            run(768, 1, 16),
        ];
        assert_eq!(found, expected);
        assert_eq!(runs(Grid { rows: 4, columns: 6 }, 4), [run(0, 1, 24)]);
        assert_eq!(runs(Grid { rows: 8, columns: 16 }, 4), [run(0, 2, 64)]);
    }

    #[test]
    fn every_cell_is_in_one_window() {
        for (rows, columns) in [(2, 2), (10, 14), (28, 28), (18, 2)] {
            let grid = Grid { rows, columns };
            let mut cells = cells_in_order(grid, 4);
            assert_eq!(cells[0], [0, 0]);
            let all: usize = runs(grid, 4).iter().map(|run| run.windows * run.patches).sum();
            assert_eq!((all, 4 * cells.len()), (rows * columns, rows * columns));
            cells.sort_unstable();
            cells.dedup();
            assert_eq!(cells.len(), grid.tokens());
        }
        assert_eq!(patches_of(&[[1, 2]]), [[2, 4], [2, 5], [3, 4], [3, 5]]);
    }
}
