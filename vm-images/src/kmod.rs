//! Kernel modules of a Debian kernel package: found, decompressed, stripped, and put in loading order.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use object::{Object, ObjectSection};

use crate::error::{Context, Error, Result};
use crate::tool;

/// A module that goes into an image.
#[derive(Debug)]
pub struct Module {
    /// Its name, with underscores as the kernel spells it.
    pub name: String,
    /// The decompressed and stripped object file.
    pub bytes: Vec<u8>,
    /// Modules that must be loaded before it (built-in ones left out).
    pub needs: Vec<String>,
}

/// The modules of one kernel release.
#[derive(Debug)]
pub struct ModuleTree {
    directory: PathBuf,
    files: BTreeMap<String, PathBuf>,
    built_in: Vec<String>,
}

impl ModuleTree {
    /// Finds the modules below a package root (`usr/lib/modules/RELEASE` or `lib/modules/RELEASE`).
    ///
    /// # Errors
    /// No such directory, or not exactly one release in it.
    pub fn open(root: &Path) -> Result<Self> {
        let mut releases = Vec::new();
        for parent in ["usr/lib/modules", "lib/modules"].map(|part| root.join(part)) {
            if let Ok(entries) = fs::read_dir(&parent) {
                releases.extend(entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()));
            }
        }
        let [directory] = releases.as_slice() else {
            return Err(Error::Malformed {
                path: root.to_owned(),
                problem: format!("expected the modules of one kernel release, found {}", releases.len()),
            });
        };
        let mut files = BTreeMap::new();
        walk(directory, &mut |path| {
            if let Some(name) = module_name(path) {
                files.insert(name, path.to_owned());
            }
        })?;
        let list = directory.join("modules.builtin");
        let built_in = fs::read_to_string(&list)
            .at("read", &list)?
            .lines()
            .filter_map(|line| module_name(Path::new(line)))
            .collect();
        Ok(Self { directory: directory.clone(), files, built_in })
    }

    /// The kernel release, as `uname -r` prints it.
    pub fn release(&self) -> String {
        self.directory.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// The named modules and all that they need, each after what it needs. Built-in ones are left out.
    ///
    /// `doing` is told each module's name as its work begins.
    ///
    /// # Errors
    /// A module that the kernel does not have, or one that cannot be decompressed or stripped.
    pub fn closure(
        &self,
        wanted: &[String],
        strip: &[String],
        scratch: &Path,
        mut doing: impl FnMut(&str),
    ) -> Result<Vec<Module>> {
        let mut modules = Vec::new();
        for name in wanted {
            self.add(&name.replace('-', "_"), strip, scratch, &mut doing, &mut modules)?;
        }
        Ok(modules)
    }

    fn add(
        &self,
        name: &str,
        strip: &[String],
        scratch: &Path,
        doing: &mut impl FnMut(&str),
        modules: &mut Vec<Module>,
    ) -> Result<()> {
        if modules.iter().any(|module| module.name == name) || self.built_in.iter().any(|known| known == name)
        {
            return Ok(());
        }
        let Some(file) = self.files.get(name) else {
            return Err(Error::Malformed {
                path: self.directory.clone(),
                problem: format!("no module {name}, neither as a file nor built in"),
            });
        };
        doing(name);
        let bytes = decompressed(file)?;
        let needs: Vec<String> =
            depends(&bytes).map_err(|problem| Error::Malformed { path: file.clone(), problem })?;
        for need in &needs {
            self.add(need, strip, scratch, doing, modules)?;
        }
        let needs =
            needs.into_iter().filter(|need| modules.iter().any(|module| module.name == *need)).collect();
        modules.push(Module { name: name.to_owned(), bytes: stripped(bytes, strip, scratch)?, needs });
        Ok(())
    }
}

/// The kernel's name of the module in a file such as `virtio-gpu.ko.xz`.
fn module_name(path: &Path) -> Option<String> {
    let (name, rest) = path.file_name()?.to_str()?.split_once(".ko")?;
    matches!(rest, "" | ".xz" | ".zst" | ".gz").then(|| name.replace('-', "_"))
}

fn walk(directory: &Path, found: &mut impl FnMut(&Path)) -> Result<()> {
    for entry in fs::read_dir(directory).at("read", directory)?.flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => walk(&entry.path(), found)?,
            Ok(kind) if kind.is_file() => found(&entry.path()),
            _ => {}
        }
    }
    Ok(())
}

fn decompressed(file: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut reader = File::open(file).at("open", file)?;
    match file.extension().and_then(|extension| extension.to_str()) {
        Some("ko") => reader.read_to_end(&mut bytes).at("read", file)?,
        Some("xz") => liblzma::read::XzDecoder::new(reader).read_to_end(&mut bytes).at("decompress", file)?,
        other => {
            return Err(Error::Malformed {
                path: file.to_owned(),
                problem: format!("expected .ko or .ko.xz, found {}", other.unwrap_or("no extension")),
            });
        }
    };
    Ok(bytes)
}

/// The names in a module's `depends=` entry (section .modinfo holds `key=value` strings, each ended by a zero byte).
fn depends(bytes: &[u8]) -> std::result::Result<Vec<String>, String> {
    let file = object::File::parse(bytes).map_err(|error| format!("not an object file: {error}"))?;
    let section = file.section_by_name(".modinfo").ok_or("no section .modinfo")?;
    let data = section.data().map_err(|error| format!("section .modinfo: {error}"))?;
    let text = data
        .split(|byte| *byte == 0)
        .find_map(|entry| entry.strip_prefix(b"depends="))
        .ok_or("no depends= in section .modinfo")?;
    let text = std::str::from_utf8(text).map_err(|error| format!("depends=: {error}"))?;
    Ok(text.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect())
}

/// The module without the given sections. The appended signature goes with the rewrite, which the kernel accepts where
/// it does not enforce signatures.
fn stripped(bytes: Vec<u8>, sections: &[String], scratch: &Path) -> Result<Vec<u8>> {
    if sections.is_empty() {
        return Ok(bytes);
    }
    tool::require(&["objcopy"])?;
    let path = scratch.join("module.ko");
    fs::write(&path, bytes).at("write", &path)?;
    let mut command = Command::new("objcopy");
    command.args(sections.iter().map(|section| format!("--remove-section={section}"))).arg(&path);
    tool::output(&mut command)?;
    fs::read(&path).at("read", &path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn module_files_are_recognised() {
        assert_eq!(module_name(Path::new("a/virtio-gpu.ko.xz")).unwrap(), "virtio_gpu");
        assert_eq!(module_name(Path::new("kernel/drm.ko")).unwrap(), "drm");
        assert_eq!(module_name(Path::new("modules.order")), None);
        assert_eq!(module_name(Path::new("x.kotlin")), None);
    }

    #[test]
    fn what_is_no_module_is_refused() {
        assert!(depends(b"text").unwrap_err().contains("not an object file"));
        let own = fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(depends(&own).unwrap_err().contains(".modinfo"));
    }
}
