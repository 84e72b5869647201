//! The model's files as stock tools see them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use kfd_model::Model;
use kfd_model::profile::Profile;
use kfd_seam::{Entry, KfdService, Lookup};

use crate::support::{output_of, run};

/// Every path that the model has, with what `stat` calls it and what it contains or leads to.
fn paths(model: &Model) -> BTreeMap<PathBuf, (&'static str, Vec<u8>)> {
    let mut found = BTreeMap::new();
    let mut pending = vec![PathBuf::from("/")];
    while let Some(path) = pending.pop() {
        let Lookup::Found(entry) = model.lookup(&path) else { panic!("{path:?} is listed and not there") };
        match entry {
            Entry::Directory { entries, merge } => {
                pending.extend(entries.iter().map(|entry| path.join(&entry.name)));
                // One that shows a real one through is the model's only as far as its names go.
                if !merge {
                    found.insert(path, ("directory", Vec::new()));
                }
            }
            Entry::File(content) if content.is_empty() => {
                found.insert(path, ("regular empty file", content));
            }
            Entry::File(content) => {
                found.insert(path, ("regular file", content));
            }
            Entry::Symlink(target) => {
                found.insert(path, ("symbolic link", target.into_encoded_bytes()));
            }
            Entry::Device { major, minor, .. } => {
                found.insert(path, ("character special file", format!("{major:x}:{minor:x}").into_bytes()));
            }
        }
    }
    found
}

/// No path of the model lies outside of what the library asks it about.
#[test]
fn every_path_is_served() {
    for profile in ["gfx906", "gfx906x2", "none"] {
        let model = Model::new(Profile::load(profile).unwrap()).unwrap();
        let paths = paths(&model);
        assert!(paths.contains_key(Path::new("/dev/kfd")));
        let mut command = Command::new("stat");
        let text = output_of(profile, command.args(["-c", "%n|%F|%t:%T"]).args(paths.keys()));
        assert_eq!(text.lines().count(), paths.len());
        for (line, (path, (kind, content))) in text.lines().zip(&paths) {
            let device =
                if *kind == "character special file" { std::str::from_utf8(content).unwrap() } else { "0:0" };
            assert_eq!(line, format!("{}|{kind}|{device}", path.display()), "{profile}");
        }
        let of_kind = |wanted: &str| -> Vec<_> {
            paths
                .iter()
                .filter(|(_, (kind, _))| *kind == wanted)
                .map(|(path, (_, content))| (path, content))
                .collect()
        };
        let files = of_kind("regular file");
        let output = run(profile, Command::new("cat").args(files.iter().map(|(path, _)| path)));
        let contents: Vec<u8> = files.iter().flat_map(|(_, content)| content.iter().copied()).collect();
        assert!(output.status.success() && output.stdout == contents, "{profile}");
        let links = of_kind("symbolic link");
        if !links.is_empty() {
            let output = run(profile, Command::new("readlink").args(links.iter().map(|(path, _)| path)));
            let targets: Vec<u8> =
                links.iter().flat_map(|(_, target)| [target.as_slice(), b"\n"].concat()).collect();
            assert_eq!(
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&targets),
                "{profile}"
            );
        }
    }
}

/// `lsmod` shows what `/proc/modules` says; rocminfo of bookworm asks it.
#[test]
fn the_driver_is_loaded() {
    let text = output_of("gfx906", Command::new("cat").arg("/proc/modules"));
    assert_eq!(text.lines().filter(|line| line.starts_with("amdgpu ")).count(), 1, "{text}");
    assert_eq!(output_of("gfx906", Command::new("cat").arg("/sys/module/amdgpu/initstate")), "live\n");
}

/// A wrong profile ends with a sentence, and never on the machine's real driver.
#[test]
fn a_wrong_profile_is_named() {
    let output = run("gfx000", Command::new("cat").arg("/dev/kfd"));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.starts_with("kfd-model: ") && errors.contains("gfx000"), "{errors}");
    assert!(errors.ends_with("cat: /dev/kfd: No such device\n"), "{errors}");
}
