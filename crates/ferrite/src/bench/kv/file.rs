//! Files for results.

use std::fs::{File, OpenOptions};
use std::io::{Seek as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// A file for a result. It is opened before the first measurement, so that a path that cannot be
/// written is reported at once. If there is no result, a file that [`open`](Self::open) created is
/// removed, and an existing file stays unchanged.
pub(super) struct ResultFile {
    path: PathBuf,
    file: File,
    is_left_over: bool,
}

impl ResultFile {
    pub(super) fn open(path: &Path) -> anyhow::Result<Self> {
        let is_left_over = !path.exists();
        let file = OpenOptions::new().create(true).write(true).truncate(false).open(path);
        let file = file.with_context(|| cannot_write(path))?;
        Ok(Self { path: path.to_owned(), file, is_left_over })
    }

    /// Replaces the contents.
    pub(super) fn write(&mut self, text: &str) -> anyhow::Result<()> {
        // This fails for a pipe, which has neither a length nor a position.
        let _ = self.file.set_len(0).and_then(|()| self.file.rewind());
        self.is_left_over = false;
        self.file.write_all(text.as_bytes()).with_context(|| cannot_write(&self.path))
    }
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

impl Drop for ResultFile {
    fn drop(&mut self) {
        if self.is_left_over {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
