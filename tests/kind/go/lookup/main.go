// Lookup queries one name server for one name and prints the addresses: lookup SERVER NAME.
// Run on a node, it checks that CoreDNS answers at its service's address; node images contain no such tool.
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: lookup SERVER NAME")
		os.Exit(2)
	}
	server, name := net.JoinHostPort(os.Args[1], "53"), os.Args[2]
	resolver := net.Resolver{
		PreferGo: true,
		Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, server)
		},
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	addresses, err := resolver.LookupHost(ctx, name)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for _, address := range addresses {
		fmt.Println(address)
	}
}
