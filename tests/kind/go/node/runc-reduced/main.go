// Runc-reduced replaces runc where this machine's root lacks CAP_SYS_RESOURCE.
//
// Docker gives a privileged container all capabilities, and runc then fails with "unable to apply caps", because a
// process cannot pass on a capability that it lacks. This program removes that one capability from the file that runc is
// about to read (config.json of the --bundle, or the --process file of `runc exec`) and then executes runc.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

const missing = "CAP_SYS_RESOURCE"

func main() {
	if err := becomeRunc(); err != nil {
		fmt.Fprintln(os.Stderr, "runc-reduced:", err)
		os.Exit(1)
	}
}

func becomeRunc() error {
	if bundle := option("--bundle", "-b"); bundle != "" {
		if err := reduce(filepath.Join(bundle, "config.json"), "process"); err != nil {
			return err
		}
	}
	if process := option("--process", "-p"); process != "" {
		if err := reduce(process); err != nil {
			return err
		}
	}
	// Not from $PATH: dockerd and containerd may set none, and this program may be installed there as runc.
	for _, runc := range []string{"/usr/sbin/runc", "/usr/bin/runc", "/usr/local/sbin/runc", "/usr/local/bin/runc"} {
		if _, err := os.Stat(runc); err == nil {
			return syscall.Exec(runc, append([]string{"runc"}, os.Args[1:]...), os.Environ())
		}
	}
	return fmt.Errorf("runc is not installed")
}

// option returns the value of a flag of the command line, in either spelling and with or without "=".
func option(names ...string) string {
	for i, arg := range os.Args {
		for _, name := range names {
			if arg == name && i+1 < len(os.Args) {
				return os.Args[i+1]
			}
			if value, found := strings.CutPrefix(arg, name+"="); found {
				return value
			}
		}
	}
	return ""
}

// reduce removes the capability from the process description at the given path of keys in a JSON file.
func reduce(file string, keys ...string) error {
	content, err := os.ReadFile(file)
	if err != nil {
		if os.IsNotExist(err) {
			return nil // runc reports the error
		}
		return err
	}
	var document map[string]any
	decoder := json.NewDecoder(bytes.NewReader(content))
	decoder.UseNumber() // limits are 64-bit numbers, which a float would round
	if err := decoder.Decode(&document); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	process := document
	for _, key := range keys {
		process, _ = process[key].(map[string]any)
	}
	sets, _ := process["capabilities"].(map[string]any)
	changed := false
	for name, set := range sets {
		kept := []any{}
		for _, capability := range asList(set) {
			if capability == missing {
				changed = true
				continue
			}
			kept = append(kept, capability)
		}
		sets[name] = kept
	}
	if !changed {
		return nil
	}
	content, err = json.Marshal(document)
	if err != nil {
		return err
	}
	return os.WriteFile(file, content, 0o600)
}

func asList(value any) []any {
	list, _ := value.([]any)
	return list
}
